/* Loads each library named on the command line as a CUDA program does, by name alone, and prints which one it got. */
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char **names)
{
    for (int i = 1; i < count; i++) {
        void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        int (*which)(void) = library ? (int (*)(void))dlsym(library, "which_library") : 0;
        if (which)
            printf("%s %d\n", names[i], which());
        else
            printf("%s none\n", names[i]);
    }
    return 0;
}
