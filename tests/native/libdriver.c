/* A tiny shared object that says which one it is: -DWHICH=number. */
int which_library(void) { return WHICH; }
