/* What region.c has in addition to library.h, without CUDA: its own tests use it. */
#ifndef GPUSHARE_REGION_H
#define GPUSHARE_REGION_H

#include <stdint.h>

#ifndef GPUSHARE_DIRECTORY
#define GPUSHARE_DIRECTORY "/etc/vcuda" /* of the container; a test builds with another one. No variable: the tenant sets those */
#endif
#ifndef GPUSHARE_NODES
#define GPUSHARE_NODES "/sys/devices/system/node"
#endif

struct slot_use {
    int32_t pid;
    uint64_t bytes;
};
unsigned list_slots(int gpu, struct slot_use *uses, unsigned room); /* of the processes that are alive and have memory there */
void watch_region(void);  /* once in a process: fork waits while a slot is taken */
void forget_region(void); /* in a child of fork */
void container_names(char *pod_uid, char *container); /* of gpushare.config, into as many bytes as it has for them */

#endif
