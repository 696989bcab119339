/* Prints what each context computed, by the fake driver's state file: one line of JSON for each, in milliseconds a slot. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>

#include "machine.h"
#include "slices.h"

int main(int count, char **words)
{
    int file = count > 1 ? open(words[1], O_RDONLY) : -1;
    const char *state = mmap(NULL, MAX_GPUS * sizeof(sim_gpu) + 8, PROT_READ, MAP_PRIVATE, file, 0);
    if (file < 0 || state == MAP_FAILED)
        return 1;
    const sim_gpu *gpus = (const sim_gpu *)(state + 8); /* behind the layout's number */
    for (int i = 0; i < MAX_GPUS * CONTEXTS; i++) {
        const sim_gpu *gpu = &gpus[i / CONTEXTS];
        const sim_context *at = &gpu->contexts[i % CONTEXTS];
        int last = METER_SLOTS;
        if (!at->is_used)
            continue;
        while (last && !at->gross[last - 1])
            last--;
        printf("{\"pid\": %d, \"clock\": %.6f, \"slot_s\": %g, \"net\": [", at->pid, (double)gpu->began / 1e9, METER_NS / 1e9);
        for (int i = 0; i < last; i++)
            printf("%s%.3f", i ? ", " : "", (double)at->net[i] / 1e6);
        printf("], \"gross\": [");
        for (int i = 0; i < last; i++)
            printf("%s%.3f", i ? ", " : "", (double)at->gross[i] / 1e6);
        printf("]}\n");
    }
    return 0;
}
