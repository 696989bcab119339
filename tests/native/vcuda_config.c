/* Reads vcuda.config and pids.config as an in-container library does: the struct is declared here, from docs/reference/formats.md,
 * and the compiler lays it out. `config FILE` prints each field, `pids FILE PID...` searches each PID by bisection. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>

struct version {
    int32_t major;
    int32_t minor;
};

struct resource {
    char pod_uid[48];
    int32_t limit;
    char reserved[4044];
    char container_name[4096];
    char bus_id[16];
    uint64_t gpu_memory;
    int32_t utilization;
    int32_t hard_limit;
    struct version driver;
    int32_t enable;
};

static int print_config(FILE *file)
{
    static struct resource data;
    char one_more;
    if (fread(&data, sizeof data, 1, file) != 1 || fread(&one_more, 1, 1, file) != 0) {
        fprintf(stderr, "the file does not have %zu bytes\n", sizeof data);
        return 1;
    }
    printf("size=%zu\n", sizeof data);
    printf("pod_uid=%s\n", data.pod_uid);
    printf("limit=%d\n", data.limit);
    printf("container_name=%s\n", data.container_name);
    printf("bus_id=%s\n", data.bus_id);
    printf("gpu_memory=%llu\n", (unsigned long long)data.gpu_memory);
    printf("utilization=%d\n", data.utilization);
    printf("hard_limit=%d\n", data.hard_limit);
    printf("driver=%d.%d\n", data.driver.major, data.driver.minor);
    printf("enable=%d\n", data.enable);
    for (size_t i = 0; i < sizeof data.reserved; i++)
        if (data.reserved[i] != 0) {
            fprintf(stderr, "reserved byte %zu is not zero\n", i);
            return 1;
        }
    return 0;
}

static int compare(const void *a, const void *b)
{
    int32_t left = *(const int32_t *)a, right = *(const int32_t *)b;
    return (left > right) - (left < right);
}

static int find_pids(FILE *file, int count, char **wanted)
{
    static int32_t pids[1024];
    size_t found = fread(pids, sizeof pids[0], 1024, file);
    printf("count=%zu\n", found);
    for (int i = 0; i < count; i++) {
        int32_t pid = (int32_t)atol(wanted[i]);
        int is_there = bsearch(&pid, pids, found, sizeof pids[0], compare) != NULL;
        printf("%d=%s\n", pid, is_there ? "found" : "absent");
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: vcuda_config config|pids FILE [PID...]\n");
        return 2;
    }
    FILE *file = fopen(argv[2], "rb");
    if (file == NULL || flock(fileno(file), LOCK_EX) != 0) {
        perror(argv[2]);
        return 1;
    }
    return strcmp(argv[1], "config") == 0 ? print_config(file) : find_pids(file, argc - 3, argv + 3);
}
