"""Models on a mesh of devices: how they are cut, programs over it, their weights, its hosts."""
