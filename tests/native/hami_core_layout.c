/* Prints where HAMi-core's shared region has each field, as `name offset` lines, from the library's own header. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdio.h>
#include "multiprocess/multiprocess_memory_limit.h"

#define REGION(field) printf("%s %zu\n", #field, offsetof(shared_region_t, field))
#define SLOT(field) printf("slot.%s %zu\n", #field, offsetof(shrreg_proc_slot_t, field))

int main(void) {
    REGION(initialized_flag); REGION(major_version); REGION(minor_version); REGION(owner_pid); REGION(sem);
    REGION(limit); REGION(sm_limit); REGION(procs); REGION(proc_num); REGION(sem_postinit);
    SLOT(pid); SLOT(hostpid); SLOT(used); SLOT(seqlock);
    printf("used.total %zu\n", offsetof(device_memory_t, total));
    printf("sizeof.used %zu\nsizeof.slot %zu\nsizeof.region %zu\n",
           sizeof(device_memory_t), sizeof(shrreg_proc_slot_t), sizeof(shared_region_t));
    printf("magic %d\nmajor %d\nminor %d\ngpus %d\nprocesses %d\n", MULTIPROCESS_SHARED_REGION_MAGIC_FLAG, MAJOR_VERSION,
           MINOR_VERSION, CUDA_DEVICE_MAX_COUNT, SHARED_REGION_MAX_PROCESS_NUM);
    return 0;
}
