/* gpu-client: registers a process that starts CUDA with the node's agent. vcuda-control runs it once per process:
 *
 *   gpu-client --addr SOCKET --bus-id B --pod-uid U (--cont-name N | --cont-id ID)
 *
 * and ends the process where it exits with another code than 0. So an agent that restarts or is busy must not show here:
 *
 * | answer | exit code |
 * |---|---|
 * | OK | 0 |
 * | INVALID_ARGUMENT, PERMISSION_DENIED, UNIMPLEMENTED, UNAUTHENTICATED | 1, with the agent's text |
 * | none, or any other | as below, after calls for CALLS_MS |
 * | vcuda.config and pids.config lie there | 0, with a line: the library reads its limits from them, the agent adds the
 *   process to pids.config as soon as it runs, and registering would only have brought that forward |
 * | they do not | 1 |
 * | wrong arguments | 2 |
 *
 * The call is vdevice.c's. Built static: it runs in any image. No other file is read; the bus ID, of which the agent has no
 * use, is not sent.
 */
#include "vdevice.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#ifndef CALLS_MS
#define CALLS_MS 30000 /* the last call begins by then: the agent restarts in seconds, and the program waits meanwhile */
#endif
#ifndef ATTEMPT_MS
#define ATTEMPT_MS 12000 /* the agent answers within 10 s */
#endif
enum { MAX_UID = 64, MAX_NAME = 512, FIRST_PAUSE_MS = 50, LONGEST_PAUSE_MS = 2000 };

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Between nothing and `longest_ms`: those that start together shall not call again together. */
static void pause_up_to(int64_t longest_ms)
{
    static uint64_t random;
    struct timespec now, pause;
    clock_gettime(CLOCK_MONOTONIC, &now);
    random = (random ^ (uint64_t)now.tv_nsec ^ (uint64_t)getpid() << 32) * 6364136223846793005u + 1442695040888963407u;
    int64_t ms = (int64_t)(random >> 33) % (longest_ms + 1);
    pause = (struct timespec){ms / 1000, ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

/* Whether the files are there that the library is about to read: next to the socket, or in a directory named after the ID. */
static bool has_files(const struct vdevice_names *with)
{
    static const char *const NAMES[] = {"vcuda.config", "pids.config"};
    const char *slash = strrchr(with->addr, '/');
    int length = slash ? (int)(slash - with->addr) : 1;
    char path[512];
    struct stat status;
    for (int i = 0; i < 2; i++) {
        int size = snprintf(path, sizeof path, "%.*s/%s%s%s", length, slash ? with->addr : ".", with->id,
                            *with->id ? "/" : "", NAMES[i]);
        if (size < 0 || size >= (int)sizeof path || stat(path, &status) || !S_ISREG(status.st_mode))
            return false;
    }
    return true;
}

static bool is_id(const char *text)
{
    return !*text || (strlen(text) == 64 && strspn(text, "0123456789abcdef") == 64);
}

static bool read_arguments(int count, char **given, struct vdevice_names *into)
{
    const char *ignored;
    const struct { const char *flag; const char **value; } FLAGS[] = {
        {"--addr", &into->addr}, {"--bus-id", &ignored}, {"--pod-uid", &into->pod_uid},
        {"--cont-name", &into->name}, {"--cont-id", &into->id},
    };
    *into = (struct vdevice_names){"", "", "", ""};
    for (int i = 1; i < count; i += 2) {
        size_t known = 0;
        while (known < sizeof FLAGS / sizeof *FLAGS && strcmp(given[i], FLAGS[known].flag))
            known++;
        if (known == sizeof FLAGS / sizeof *FLAGS || i + 1 == count)
            return false;
        *FLAGS[known].value = given[i + 1];
    }
    return *into->addr && strlen(into->addr) < sizeof ((struct sockaddr_un *)0)->sun_path &&
           strlen(into->pod_uid) <= MAX_UID && strlen(into->name) <= MAX_NAME && is_id(into->id) &&
           !*into->name != !*into->id;
}

int main(int count, char **given)
{
    struct vdevice_names with;
    if (!read_arguments(count, given, &with)) {
        fprintf(stderr, "usage: gpu-client --addr SOCKET [--bus-id B] --pod-uid U (--cont-name N | --cont-id ID)\n");
        return 2;
    }
    int64_t begun_ms = now_ms(), pause_ms = FIRST_PAUSE_MS;
    enum vdevice_outcome outcome = register_vdevice(&with, ATTEMPT_MS);
    while (outcome == NO_ANSWER && now_ms() - begun_ms < CALLS_MS) {
        pause_up_to(pause_ms);
        pause_ms = 2 * pause_ms < LONGEST_PAUSE_MS ? 2 * pause_ms : LONGEST_PAUSE_MS;
        outcome = register_vdevice(&with, ATTEMPT_MS);
    }
    if (outcome == REGISTERED)
        return 0;
    if (outcome == REFUSED) {
        fprintf(stderr, "gpu-client: the node's GPU agent refused to register this container at %s: %s\n", with.addr,
                vdevice_problem);
        return 1;
    }
    bool is_limited = has_files(&with);
    fprintf(stderr, "gpu-client: the node's GPU agent did not register this container at %s within %d s: %s. %s\n",
            with.addr, (int)((now_ms() - begun_ms) / 1000), vdevice_problem,
            is_limited ? "The limits that it wrote stay in force, and the program starts"
                       : "Without its limits the program cannot start: check that the agent runs on this node");
    return is_limited ? 0 : 1;
}
