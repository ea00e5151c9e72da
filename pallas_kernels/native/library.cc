// What the library says of itself.
extern "C" __attribute__((visibility("default"))) const char* const stree_jax_sources =
    STREE_JAX_SOURCES;
