/* A program that is hard on a library within it: what it closes, forks, interrupts and cuts off. Linked to the driver.
 *
 *   hard_program CASE
 *
 * Each case prints one line of JSON, and the exit code is 0 where nothing of CUDA failed that must not fail. Blocks are of 256 MiB.
 */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 256 << 20, THREADS = 32, OWN_FILES = 40, CHILDREN = 100 };
#define FUNCTION ((CUfunction)(uintptr_t)8)

static CUresult start(void)
{
    CUcontext context;
    CUresult result = cuInit(0);
    if (result == CUDA_SUCCESS)
        result = cuDevicePrimaryCtxRetain(&context, 0);
    return result ? result : cuCtxSetCurrent(context);
}

static int take(int most)
{
    CUdeviceptr address;
    int taken = 0;
    while (taken < most && cuMemAlloc_v2(&address, BLOCK) == CUDA_SUCCESS)
        taken++;
    return taken;
}

static CUresult launch(unsigned blocks) { return cuLaunchKernel(FUNCTION, blocks, 1, 1, 256, 1, 1, 0, NULL, NULL, NULL); }

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* The rest of a launch's time is waiting: so many of a millisecond in a second is the share. */
static double rate_of_launches(double seconds)
{
    double began = now_s();
    long count = 0;
    for (; now_s() - began < seconds; count++)
        if (launch(1056) != CUDA_SUCCESS)
            return -1;
    return (double)count / (now_s() - began);
}

static int say(const char *name, int blocks, int result)
{
    printf("{\"action\": \"%s\", \"blocks\": %d, \"result\": %d}\n", name, blocks, result);
    fflush(stdout);
    return 0;
}

/* The child never asks the library for anything, and outlives its parent, which has six blocks. */
static int orphan(pid_t (*make_child)(void))
{
    if (start() || take(6) != 6)
        return 3;
    if (make_child() == 0) {
        getchar();
        _exit(0);
    }
    say("orphan", 6, 0);
    return kill(getpid(), SIGKILL);
}

static pid_t clone_alone(void) { return (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL); }

/* As a daemon does, after it has begun with CUDA; then the numbers are files of its own. */
static int own_files[OWN_FILES];

/* A real one's are devices, without which no program can go on. */
static int is_of_fake_driver(int file)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path);
    return length > 6 && memcmp(path + length - 6, "/state", 6) == 0;
}

static int close_all(void)
{
    if (start() || take(4) != 4)
        return 3;
    for (int file = 3; file < 1000; file++)
        if (!is_of_fake_driver(file))
            close(file);
    for (int i = 0; i < OWN_FILES; i++)
        if ((own_files[i] = open("/dev/null", O_RDONLY)) < 0)
            return 4;
    say("closed", 4, 0);
    getchar();
    int more = take(20), status = 0, locks = 0;
    for (int i = 0; i < OWN_FILES; i++) {
        struct flock byte = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 1 << 20, .l_len = 256};
        locks += fcntl(own_files[i], F_OFD_GETLK, &byte) == 0 && byte.l_type != F_UNLCK;
    }
    pid_t child = fork();
    if (child == 0) {
        int lost = cuInit(0) != CUDA_SUCCESS;
        struct stat null, found;
        stat("/dev/null", &null);
        for (int i = 0; i < OWN_FILES; i++)
            lost += fstat(own_files[i], &found) != 0 || found.st_rdev != null.st_rdev;
        _exit(lost != 0);
    }
    waitpid(child, &status, 0);
    return say("more", more, status + locks);
}

/* Errors, as the driver has them before cuInit; afterwards all is as ever. */
static int ask_too_early(void)
{
    CUcontext context;
    CUdeviceptr address;
    size_t bytes;
    int results = cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS;
    results += cuDeviceTotalMem_v2(&bytes, 0) != CUDA_SUCCESS;
    results += cuCtxCreate_v2(&context, 0, 0) != CUDA_SUCCESS;
    results += cuMemAlloc_v2(&address, BLOCK) != CUDA_SUCCESS;
    if (start())
        return 3;
    return say("early", take(20), results);
}

static int map_one(void)
{
    enum { BYTES = 2 << 20 };
    CUmemAllocationProp on_gpu = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location.type = CU_MEM_LOCATION_TYPE_DEVICE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    return cuMemCreate(&handle, BYTES, &on_gpu, 0) || cuMemAddressReserve(&address, BYTES, 0, 0, 0) ||
           cuMemMap(address, BYTES, 0, handle, 0);
}

/* A fork comes when it likes: here each time that the driver or a library grows what it has, with its lock and in the middle of that. */
extern void *__libc_realloc(void *old, size_t bytes);
static int forks_in_realloc, forked, ended_badly;
void *realloc(void *old, size_t bytes)
{
    void *grown = __libc_realloc(old, bytes);
    if (forks_in_realloc) {
        int status = -1;
        forks_in_realloc = 0;
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            _exit(start() != CUDA_SUCCESS || take(1) != 1 || map_one());
        }
        waitpid(child, &status, 0);
        forked++, ended_badly += status != 0;
        forks_in_realloc = 1;
    }
    return grown;
}

static int fork_within_calls(void)
{
    CUdeviceptr address;
    int failed = start();
    forks_in_realloc = 1;
    for (int i = 0; i < 65; i++)
        failed += cuMemAlloc_v2(&address, 2 << 20) != CUDA_SUCCESS;
    for (int i = 0; i < 2; i++)
        failed += map_one();
    forks_in_realloc = 0;
    return failed ? 3 : say("forked", forked, ended_badly);
}

static pthread_barrier_t all_ready;
static void *begin_in_thread(void *taken)
{
    pthread_barrier_wait(&all_ready);
    if (start() == CUDA_SUCCESS)
        *(int *)taken = take(1);
    return NULL;
}

static int begin_at_once(void)
{
    pthread_t all[THREADS];
    int taken[THREADS] = {0}, sum = 0;
    pthread_barrier_init(&all_ready, NULL, THREADS);
    for (int i = 0; i < THREADS; i++)
        pthread_create(&all[i], NULL, begin_in_thread, &taken[i]);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(all[i], NULL);
        sum += taken[i];
    }
    return say("threads", sum, 0);
}

/* Every thread takes and gives while the program forks; each child begins again and takes a block. */
static volatile int is_over;
static void *take_and_give(void *unused)
{
    CUcontext context;
    CUdeviceptr address;
    (void)unused;
    cuDevicePrimaryCtxRetain(&context, 0);
    cuCtxSetCurrent(context);
    while (!is_over)
        if (cuMemAlloc_v2(&address, 1 << 20) == CUDA_SUCCESS) {
            launch(1);
            cuMemFree_v2(address);
        }
    return NULL;
}

static int fork_among(void *(*others)(void *), int (*fails_in_child)(void))
{
    pthread_t all[4];
    int status, failed = 0;
    if (start())
        return 3;
    for (int i = 0; i < 4; i++)
        pthread_create(&all[i], NULL, others, NULL);
    for (int i = 0; i < CHILDREN; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(20); /* one that hangs is an error */
            is_over = 1;
            _exit(fails_in_child());
        }
        waitpid(child, &status, 0);
        failed += status != 0;
    }
    is_over = 1;
    for (int i = 0; i < 4; i++)
        pthread_join(all[i], NULL);
    return say("forked", CHILDREN, failed);
}

static int fails_to_take(void) { return start() != CUDA_SUCCESS || take(1) != 1; }

/* Threads only ask for an address, of which there is none, while the program forks; each child asks for the same one. */
static void *free_nothing(void *unused)
{
    while (!is_over)
        cuMemFreeAsync(BLOCK, NULL);
    return unused;
}

static int frees_nothing(void) { return cuMemFreeAsync(BLOCK, NULL) == CUDA_SUCCESS; }

/* A parent that has not begun with its child until threads of the child do, all at once. */
static int threads_of_child(void)
{
    int status;
    if (start() || take(3) != 3)
        return 3;
    pid_t child = fork();
    if (child == 0)
        _exit(begin_at_once());
    waitpid(child, &status, 0);
    return status != 0;
}

static pthread_key_t key;
static int results_at_end;
static void ask_at_end(void *unused)
{
    size_t free_bytes, total;
    CUdeviceptr address;
    (void)unused;
    results_at_end += cuMemGetInfo_v2(&free_bytes, &total) != CUDA_SUCCESS;
    results_at_end += cuMemAlloc_v2(&address, 1 << 20) != CUDA_SUCCESS || cuMemFree_v2(address) != CUDA_SUCCESS;
    results_at_end += launch(1) != CUDA_SUCCESS;
}
static void ask_at_exit(void)
{
    ask_at_end(NULL);
    say("exit", 0, results_at_end);
}
static void *end_with_key(void *context)
{
    cuCtxSetCurrent(context);
    pthread_setspecific(key, context);
    return NULL;
}
__attribute__((destructor)) static void ask_in_destructor(void)
{
    if (key)
        ask_at_end(NULL);
}
static int ask_when_it_ends(void)
{
    CUcontext context;
    pthread_t thread;
    if (start() || cuCtxGetCurrent(&context))
        return 3;
    pthread_key_create(&key, ask_at_end);
    if (!key)
        pthread_key_create(&key, ask_at_end); /* 0 is a key, too; here it says that there is none */
    atexit(ask_at_exit);
    pthread_create(&thread, NULL, end_with_key, context);
    pthread_join(thread, NULL);
    return 0;
}

/* Signals by the thousand, whose handler calls what a handler of a profiler calls. */
static void ask_in_handler(int unused)
{
    (void)unused;
    if (dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") == NULL || dlsym(RTLD_DEFAULT, "no such function") != NULL)
        abort();
}
static int interrupt(void)
{
    struct sigaction action = {.sa_handler = ask_in_handler};
    struct itimerval often = {.it_interval = {.tv_usec = 500}, .it_value = {.tv_usec = 500}};
    sigaction(SIGALRM, &action, NULL);
    if (start() || setitimer(ITIMER_REAL, &often, NULL))
        return 3;
    double rate = rate_of_launches(2);
    int taken = take(20);
    setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL);
    return say("signals", taken, (int)rate);
}

/* Out of a launch that waits. Afterwards the library must not think that the thread is still in it. */
static sigjmp_buf back;
static void jump(int unused)
{
    (void)unused;
    siglongjmp(back, 1);
}
static int jump_out(void)
{
    struct sigaction action = {.sa_handler = jump};
    struct itimerval once = {.it_value = {.tv_usec = 500000}};
    sigaction(SIGALRM, &action, NULL);
    if (start() || setitimer(ITIMER_REAL, &once, NULL))
        return 3;
    if (sigsetjmp(back, 1) == 0)
        for (;;)
            if (launch(1056))
                return 4;
    double rate = rate_of_launches(2);
    return say("jumped", take(20), (int)rate);
}

/* Out of the driver, for which a hook waits. */
static int jump_out_of_driver(void)
{
    struct sigaction action = {.sa_handler = jump};
    struct itimerval once = {.it_value = {.tv_usec = 50000}};
    sigaction(SIGALRM, &action, NULL);
    if (start() || launch(132 * 500) || setitimer(ITIMER_REAL, &once, NULL))
        return 3;
    if (sigsetjmp(back, 1) == 0)
        return cuCtxSynchronize() ? 4 : 5; /* half a second */
    return say("jumped", take(20), 0);
}

/* A thread that is cancelled while it waits. */
static void *launch_for_ever(void *context)
{
    cuCtxSetCurrent(context);
    for (;;)
        launch(1056);
    return NULL;
}
static int cancel(void)
{
    CUcontext context;
    pthread_t thread;
    if (start() || cuCtxGetCurrent(&context))
        return 3;
    for (int i = 0; i < 10; i++) {
        pthread_create(&thread, NULL, launch_for_ever, context);
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
        pthread_cancel(thread);
        pthread_join(thread, NULL);
    }
    return say("cancelled", take(20), (int)rate_of_launches(1));
}

/* One that is cancelled already goes on to the end of its call, also where that is the first one with the files, and takes locks. */
static const char *called;
static int results_of_cancelled = -1;
static void *call_cancelled(void *context)
{
    CUdeviceptr address;
    CUcontext made;
    cuCtxSetCurrent(context);
    pthread_cancel(pthread_self());
    results_of_cancelled = strcmp(called, "alloc") == 0   ? (int)cuMemAlloc_v2(&address, 1 << 20)
                           : strcmp(called, "async") == 0 ? (int)cuMemAllocAsync(&address, 1 << 20, NULL)
                                                          : (int)cuCtxCreate_v2(&made, 0, 0);
    pthread_testcancel();
    return NULL;
}
static int be_cancelled_within(const char *call)
{
    CUcontext context;
    pthread_t thread;
    void *ended = NULL;
    called = call;
    if (start() || cuCtxGetCurrent(&context))
        return 3;
    say("before", take(1), 0);
    getchar(); /* the files come */
    nanosleep(&(struct timespec){.tv_nsec = 110000000}, NULL); /* until they are looked for again */
    pthread_create(&thread, NULL, call_cancelled, context);
    pthread_join(thread, &ended);
    alarm(20);
    cuCtxSetCurrent(context);
    int taken = take(7); /* a second context has its part */
    return say("within", taken, ended == PTHREAD_CANCELED ? results_of_cancelled : -2);
}

/* Another copy of the loader's world, into which nothing is preloaded. */
static int open_another_namespace(void)
{
    void *driver = dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW);
    CUresult (*init)(unsigned) = driver ? (CUresult(*)(unsigned))dlsym(driver, "cuInit") : NULL;
    if (!init || start())
        return 3;
    return say("namespace", take(20), (int)init(0));
}

static int become_other_user(void)
{
    if (start() || setgid(1000) || setuid(1000))
        return 3;
    return say("user", take(20), 0);
}

static int change_root(void)
{
    char name[] = "/tmp/rootXXXXXX";
    if (start() || !mkdtemp(name) || chroot(name) || chdir("/"))
        return 3;
    return say("root", take(20), 0);
}

/* The kernel refuses the locks of open files, as an older or a simulated one does. */
static int refuse_locks(void)
{
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fcntl, 0, 4),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, F_OFD_GETLK, 0, 2),
        BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, F_OFD_SETLKW, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof rules / sizeof *rules, .filter = rules};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) || start())
        return 3;
    return say("locks", take(20), (int)rate_of_launches(1));
}

/* The files come later than the program. */
static int begin_too_early(void)
{
    CUcontext context;
    if (start())
        return 3;
    int before = take(20);
    say("before", before, 0);
    getchar();
    for (int i = 0; i < 100 && take(1) == 0; i++)
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    (void)cuCtxGetCurrent(&context);
    return say("after", 1 + take(20), before);
}

/* Next to another program: neither's clock is the other one's. */
static int shift_clock(int seconds)
{
    int file = unshare(CLONE_NEWTIME) ? -1 : open("/proc/self/timens_offsets", O_WRONLY | O_CLOEXEC);
    char text[64];
    int length = snprintf(text, sizeof text, "monotonic %d 0\n", seconds);
    if (file < 0 || write(file, text, (size_t)length) != length)
        return 77;
    pid_t child = fork(); /* the namespace is the children's */
    if (child == 0) {
        if (start())
            _exit(3);
        double rate = rate_of_launches(1);
        say("clock", take(20), (int)rate);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    return WEXITSTATUS(status);
}

/* More processes of one container than it has slots, all at once: each takes one block of a MiB, and ends when all have asked. */
static int be_many(int count)
{
    static struct { int with_memory, refused, failed; } *seen;
    int begun[2], all_asked[2], status, failed = 0, made = 0;
    char byte;
    seen = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (seen == MAP_FAILED || pipe(begun) || pipe(all_asked))
        return 3;
    for (pid_t child; made < count && (child = fork()) >= 0; made++)
        if (child == 0) {
            CUdeviceptr address;
            close(all_asked[1]);
            CUresult result = start();
            result = result ? result : cuMemAlloc_v2(&address, 1 << 20);
            __atomic_add_fetch(result == CUDA_SUCCESS                 ? &seen->with_memory
                               : result == CUDA_ERROR_OUT_OF_MEMORY ? &seen->refused
                                                                    : &seen->failed,
                               1, __ATOMIC_SEQ_CST);
            _exit(write(begun[1], "x", 1) == 1 && read(all_asked[0], &byte, 1) == 0 ? 0 : 4);
        }
    for (int i = 0; i < made; i++)
        if (read(begun[0], &byte, 1) != 1)
            return 5;
    printf("{\"action\": \"many\", \"made\": %d, \"with_memory\": %d, \"refused\": %d, \"other\": %d}\n", made, seen->with_memory,
           seen->refused, seen->failed);
    fflush(stdout);
    getchar();
    close(all_asked[1]);
    while (wait(&status) > 0)
        failed += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    return say("ended", made, failed);
}

int main(int count, char **words)
{
    const char *name = count > 1 ? words[1] : "";
#define CASE(text, call)          \
    if (strcmp(name, text) == 0) \
        return call;
    CASE("orphan", orphan(fork))
    CASE("orphan-clone", orphan(clone_alone))
    CASE("close", close_all())
    CASE("early", ask_too_early())
    CASE("threads", begin_at_once())
    CASE("threads-of-child", threads_of_child())
    CASE("fork", fork_among(take_and_give, fails_to_take))
    CASE("fork-frees", fork_among(free_nothing, frees_nothing))
    CASE("fork-within", fork_within_calls())
    CASE("end", ask_when_it_ends())
    CASE("signals", interrupt())
    CASE("jump", jump_out())
    CASE("jump-out-of-driver", jump_out_of_driver())
    CASE("cancel", cancel())
    CASE("cancel-within", be_cancelled_within(count > 2 ? words[2] : ""))
    CASE("namespace", open_another_namespace())
    CASE("user", become_other_user())
    CASE("root", change_root())
    CASE("locks", refuse_locks())
    CASE("later", begin_too_early())
    CASE("many", be_many(count > 2 ? atoi(words[2]) : 100))
    CASE("clock", shift_clock(count > 2 ? atoi(words[2]) : 86400))
    fprintf(stderr, "usage: %s CASE\n", words[0]);
    return 2;
}
