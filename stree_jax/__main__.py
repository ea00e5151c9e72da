"""`python -m stree_jax`: the `stree-jax` command."""

from stree_jax_command import main

if __name__ == "__main__":
    main()
