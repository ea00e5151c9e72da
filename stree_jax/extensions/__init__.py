"""Systems of other papers, each in a room of its own, on public names of the library only."""
