"""Models on a mesh of devices: partition, programs, weights, hosts."""
