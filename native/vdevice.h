/* The call by which a process in a container registers with the node's agent: of gpu-client, and of libgpushare itself. */
#ifndef VDEVICE_H
#define VDEVICE_H

enum vdevice_outcome { REGISTERED, REFUSED, NO_ANSWER };

/* `addr` is shorter than sockaddr_un's path, the names shorter than a kilobyte together; one of `name` and `id` is empty. */
struct vdevice_names {
    const char *addr, *pod_uid, *name, *id;
};

/* One call, of `longest_ms` at most. One thread of a process at a time: what it reads lies in one place. */
enum vdevice_outcome register_vdevice(const struct vdevice_names *with, int longest_ms);
extern char vdevice_problem[1024]; /* why there was no answer, or why it was refused */

#endif
