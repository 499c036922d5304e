/* Placeholder until the counting hook lands: exports its version only. */
__attribute__((visibility("default"))) int tightfit_hook_version(void) { return 0; }
