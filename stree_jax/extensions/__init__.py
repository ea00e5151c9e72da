"""Systems of other papers, one package each, on public names of the library only."""
