/* os_linux.c -- the functions of os.h about processors, on Linux.
 *
 * The number of usable processors is the smaller of two counts: CPUs that this process may run on, and CPU time that
 * its control groups grant, rounded up to whole CPUs. A container whose quota is half a machine still sees all CPUs;
 * counting these alone would make threads that throttle each other.
 */
#define _GNU_SOURCE

#include "os.h"

#ifdef __linux__

#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- control groups ---- */

/* The smaller of two limits, where 0 is no limit. */
static int tighter(int a, int b) {
    if (a == 0 || b == 0)
        return a + b;
    return a < b ? a : b;
}

/* A quota of CPU time in each period as whole CPUs, rounded up; 0: no limit. Both in microseconds. */
static int cpus_of_quota(long long quota, long long period) {
    if (quota <= 0 || period <= 0)
        return 0;
    long long cpus = quota / period + (quota % period != 0);
    return cpus < INT_MAX ? (int)cpus : INT_MAX;
}

/* The first line of directory/name; false if there is none. */
static bool read_line(const char *directory, const char *name, char *line, int size) {
    char path[PATH_MAX];
    int length = snprintf(path, sizeof path, "%s/%s", directory, name);
    if (length < 0 || (size_t)length >= sizeof path)
        return false;
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return false;
    bool ok = fgets(line, size, file) != NULL;
    (void)fclose(file); /* only read */
    return ok;
}

/* Version 2: one file, "max 100000" or "150000 100000". */
static int quota_v2(const char *directory) {
    char line[64], *end;
    if (!read_line(directory, "cpu.max", line, sizeof line))
        return 0;
    const long long quota = strtoll(line, &end, 10); /* 0 for "max" */
    return cpus_of_quota(quota, strtoll(end, NULL, 10));
}

/* Version 1: two files; a quota of -1 is no limit. */
static int quota_v1(const char *directory) {
    char quota[32], period[32];
    if (!read_line(directory, "cpu.cfs_quota_us", quota, sizeof quota) ||
        !read_line(directory, "cpu.cfs_period_us", period, sizeof period))
        return 0;
    return cpus_of_quota(strtoll(quota, NULL, 10), strtoll(period, NULL, 10));
}

/* The tightest limit of root/mount/group and its parents up to root/mount: a parent's quota binds its children. A
 * directory that does not exist is no limit: a container sees its own group as the mount. */
static int tightest_quota(const char *root, const char *mount, const char *group, int (*quota)(const char *)) {
    char directory[PATH_MAX];
    int length = snprintf(directory, sizeof directory, "%s/%s%s", root, mount, group);
    if (length < 0 || (size_t)length >= sizeof directory || group[0] != '/')
        return 0;
    char *mounted_at = directory + strlen(root) + 1 + strlen(mount);
    int limit = quota(directory);
    while (*mounted_at != '\0') {
        *strrchr(mounted_at, '/') = '\0';
        limit = tighter(limit, quota(directory));
    }
    return limit;
}

/* Whether a list such as "cpu,cpuacct" has "cpu". */
static bool has_cpu_controller(char *controllers) {
    char *state;
    for (char *name = strtok_r(controllers, ",", &state); name != NULL; name = strtok_r(NULL, ",", &state))
        if (strcmp(name, "cpu") == 0)
            return true;
    return false;
}

/* The limit of one line of the membership file, "id:controllers:group"; version 2 has id 0 and no controllers. The
 * hierarchies are expected at their customary mount points. */
static int limit_of_line(const char *root, char *line) {
    line[strcspn(line, "\n")] = '\0';
    char *controllers = strchr(line, ':');
    char *group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
    if (group == NULL)
        return 0;
    *controllers++ = '\0';
    *group++ = '\0';
    if (*controllers == '\0')
        return tighter(tightest_quota(root, "", group, quota_v2), tightest_quota(root, "unified", group, quota_v2));
    int limit = tightest_quota(root, controllers, group, quota_v1);
    if (!has_cpu_controller(controllers))
        return 0;
    return tighter(limit, tightest_quota(root, "cpu", group, quota_v1));
}

/* The CPUs that the groups in the file `membership` (/proc/self/cgroup), mounted below `root`, grant; 0: no limit. */
static int cgroup_limit(const char *membership, const char *root) {
    FILE *file = fopen(membership, "re");
    if (file == NULL)
        return 0;
    char *line = NULL;
    size_t size = 0;
    int limit = 0;
    while (getline(&line, &size, file) > 0)
        limit = tighter(limit, limit_of_line(root, line));
    free(line);
    (void)fclose(file);
    return limit;
}

/* ---- processors ---- */
/* CPUs that this process may run on; 0: unknown. The kernel refuses a set smaller than its own, so try larger ones. */
static int affinity_count(void) {
    int count = 0;
    bool refused = true;
    for (size_t n_cpus = 1024; refused && n_cpus <= 1024 * 1024; n_cpus *= 4) {
        size_t size = CPU_ALLOC_SIZE(n_cpus);
        cpu_set_t *set = CPU_ALLOC(n_cpus);
        if (set == NULL)
            break;
        refused = sched_getaffinity(0, size, set) != 0;
        if (!refused)
            count = CPU_COUNT_S(size, set);
        CPU_FREE(set);
    }
    return count;
}

#ifdef SYS_arch_prctl
#define ARCH_REQ_XCOMP_PERM 0x1023 /* Linux 5.16 */
#define XFEATURE_TILE_DATA 18
bool cattn_os_permit_tiles(void) { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_TILE_DATA) == 0; }
#else
bool cattn_os_permit_tiles(void) { return false; }
#endif

int cattn_usable_cpus(void) {
    const int count = affinity_count();
    if (count > 0)
        return tighter(count, cgroup_limit("/proc/self/cgroup", "/sys/fs/cgroup"));
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 && online < INT_MAX ? (int)online : 1;
}

/* ---- placement ---- */

_Static_assert(sizeof(struct cattn_cpus) == sizeof(cpu_set_t), "one is copied to the other");

int cattn_current_cpu(void) { return sched_getcpu(); }

int cattn_thread_cpus(struct cattn_cpus *cpus, int except) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 0;
    const int count = CPU_COUNT(&set);
    if (except >= 0)
        CPU_CLR((unsigned)except, &set);
    memcpy(cpus, &set, sizeof set);
    return count;
}

void cattn_thread_place(cattn_thread thread, const struct cattn_cpus *cpus) {
    cpu_set_t set;
    memcpy(&set, cpus, sizeof set);
    pthread_setaffinity_np(thread, sizeof set, &set);
}

#endif
