/* run-again PROGRAM [ARGUMENT...]: runs the program, and again at once where something kills it. The image's entry point.
 *
 * While no agent runs, the kubelet rejects for good what needs a GPU. It sees a container that ended within a second or more,
 * starts another within a second, and waits ten seconds more where that is the second time in ten minutes. So this starts the
 * program again in the same container. All else is as if the program were the container's first process:
 *
 * | the program | this one |
 * |---|---|
 * | exits, with whatever code | exits with it: the kubelet starts the container again, and waits longer each time |
 * | is killed within SHORT_MS of its start, or after SIGTERM, SIGINT or SIGQUIT | exits with 128 and the signal's number |
 * | is killed because the container has no memory left | the same: the kubelet shows OOMKilled |
 * | is killed otherwise | writes a line of the log, kills what the program had started, and runs it again |
 * | cannot be run | exits with 127 |
 *
 * Every signal that can be caught is passed on, but those of a terminal that stop; SIGHUP waits until the program unblocks it.
 * If this program is killed, the other is too.
 */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef SHORT_MS
#define SHORT_MS 60000 /* what is killed more often each minute is left to the kubelet, which shows CrashLoopBackOff */
#endif
#ifndef MEMORY
#define MEMORY "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control" /* cgroup v2, v1 */
#endif

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* How many processes of the container were killed for want of memory; 0 where the kernel does not say. */
static long killed_for_memory(void)
{
    static const char *const files[] = {MEMORY};
    long killed = 0;
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        FILE *file = fopen(files[i], "re");
        char name[64];
        long number;
        while (file != NULL && fscanf(file, "%63s %ld", name, &number) == 2)
            if (strcmp(name, "oom_kill") == 0)
                killed += number;
        if (file != NULL)
            fclose(file);
    }
    return killed;
}

static pid_t start(char **program, const sigset_t *mask)
{
    pid_t self = getpid(), child = fork();
    if (child != 0)
        return child;
    setpgid(0, 0); /* so that what it starts ends with it */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != self)
        _exit(128 + SIGKILL);
    sigprocmask(SIG_SETMASK, mask, NULL);
    execvp(program[0], program);
    fprintf(stderr, "run-again: %s cannot be run: %s\n", program[0], strerror(errno));
    _exit(127);
}

/* Passes signals on until the program has ended; its status by waitpid(2). */
static int wait_for(pid_t program, const sigset_t *all, bool *is_stopping)
{
    for (;;) {
        int status, number;
        while (sigwait(all, &number) != 0)
            ;
        if (number != SIGCHLD) {
            *is_stopping |= number == SIGTERM || number == SIGINT || number == SIGQUIT;
            /* A container's first process is not stopped by Ctrl-Z, and what is would not end by SIGTERM. */
            if (number != SIGTSTP && number != SIGTTIN && number != SIGTTOU)
                kill(program, number);
            continue;
        }
        /* Others are orphans, where this is the container's PID 1. */
        for (pid_t ended; (ended = waitpid(-1, &status, WNOHANG)) > 0;)
            if (ended == program)
                return status;
    }
}

int main(int count, char **words)
{
    if (count < 2) {
        fprintf(stderr, "usage: run-again PROGRAM [ARGUMENT...]\n");
        return 2;
    }
    sigset_t all, mask;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &mask);
    sigaddset(&mask, SIGHUP); /* until the agent can read its settings again: before, it would be the agent's end */
    signal(SIGCHLD, SIG_DFL); /* where it is ignored, the kernel keeps no status of what has ended */
    for (bool is_stopping = false;;) {
        long killed = killed_for_memory();
        int64_t started = now_ms();
        pid_t program = start(words + 1, &mask);
        if (program < 0) {
            fprintf(stderr, "run-again: no process could be started: %s\n", strerror(errno));
            return 127;
        }
        int status = wait_for(program, &all, &is_stopping);
        if (WIFEXITED(status))
            return WEXITSTATUS(status);
        if (is_stopping || now_ms() - started < SHORT_MS || killed_for_memory() != killed)
            return 128 + WTERMSIG(status);
        kill(-program, SIGKILL);
        fprintf(stderr, "{\"event\": \"agent_killed\", \"level\": \"error\", \"signal\": %d, \"then\": \"it is started again\"}\n",
                WTERMSIG(status));
    }
}
