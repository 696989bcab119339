/* Prints where libgpushare's two files have each field, as `name offset` lines, from the library's own header. */
#include <stdio.h>

#include "format.h"

#define CONFIG(field) printf("config.%s %zu\n", #field, offsetof(struct config, field))
#define CONFIG_GPU(field) printf("config.gpu.%s %zu\n", #field, offsetof(struct config_gpu, field))
#define USAGE_GPU(field) printf("usage.gpu.%s %zu\n", #field, offsetof(struct usage_gpu, field))
#define SLOT(field) printf("slot.%s %zu\n", #field, offsetof(struct usage_slot, field))

int main(void)
{
    CONFIG(layout), CONFIG(size), CONFIG(gpus), CONFIG(boot_id), CONFIG(pod_uid), CONFIG(container), CONFIG(gpu);
    CONFIG_GPU(sequence), CONFIG_GPU(flags), CONFIG_GPU(uuid), CONFIG_GPU(memory), CONFIG_GPU(cores), CONFIG_GPU(ceiling);
    CONFIG_GPU(observed_at), CONFIG_GPU(observed_bytes), CONFIG_GPU(busy_since), CONFIG_GPU(busy_until), CONFIG_GPU(busy_ns);
    CONFIG_GPU(others_ns), CONFIG_GPU(published_at), CONFIG_GPU(companions), CONFIG_GPU(full), CONFIG(between_us), CONFIG(context_kib);
    USAGE_GPU(changed_at), USAGE_GPU(unattributed), USAGE_GPU(refused), USAGE_GPU(launched), USAGE_GPU(launches), USAGE_GPU(throttled), USAGE_GPU(launched_long), USAGE_GPU(turns), USAGE_GPU(present_long), USAGE_GPU(ended_at);
    SLOT(pid), SLOT(started_at), SLOT(held), SLOT(pending), SLOT(of_kind), SLOT(unhooked);
    printf("usage.gpu %zu\nusage.slot %zu\n", offsetof(struct usage, gpu), offsetof(struct usage, slot));
    printf("sizeof.config %zu\nsizeof.config.gpu %zu\n", sizeof(struct config), sizeof(struct config_gpu));
    printf("sizeof.usage.gpu %zu\nsizeof.slot %zu\n", sizeof(struct usage_gpu), sizeof(struct usage_slot));
    printf("USAGE_BYTES %d\nMOST_GPUS %d\nMOST_SLOTS %d\nKINDS %d\nLAYOUTS %d\n", USAGE_BYTES, MOST_GPUS, MOST_SLOTS, KINDS,
           CONFIG_LAYOUT == USAGE_LAYOUT ? CONFIG_LAYOUT : -1);
    printf("FIRST_LOCKED_BYTE %d\n", FIRST_LOCKED_BYTE);
    printf("TURN_NS %d\nCHANGE_NS %d\n", TURN_NS, CHANGE_NS);
    printf("flags %d\n", LIMITS_MEMORY | LIMITS_CORES << 8 | HAS_CEILING << 16);
    return 0;
}
