/* os_posix.c -- the functions of os.h on Linux, macOS and other POSIX systems. */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "os.h"

#if !defined(_WIN32) && !defined(__wasm__)

#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "../cattn.h"

#define SECOND_NS INT64_C(1000000000)

/* ---- locks ---- */

void cattn_mutex_init(cattn_mutex *mutex) { pthread_mutex_init(mutex, NULL); }
void cattn_mutex_destroy(cattn_mutex *mutex) { pthread_mutex_destroy(mutex); }
void cattn_mutex_lock(cattn_mutex *mutex) { pthread_mutex_lock(mutex); }
void cattn_mutex_unlock(cattn_mutex *mutex) { pthread_mutex_unlock(mutex); }

bool cattn_condition_init(cattn_condition *condition) {
#ifdef __APPLE__
    return pthread_cond_init(condition, NULL) == 0;
#else
    pthread_condattr_t attributes;
    if (pthread_condattr_init(&attributes) != 0)
        return false;
    bool ok = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0;
    ok = ok && pthread_cond_init(condition, &attributes) == 0;
    pthread_condattr_destroy(&attributes);
    return ok;
#endif
}

void cattn_condition_destroy(cattn_condition *condition) { pthread_cond_destroy(condition); }

void cattn_condition_wait(cattn_condition *condition, cattn_mutex *mutex) { pthread_cond_wait(condition, mutex); }

void cattn_condition_wait_until(cattn_condition *condition, cattn_mutex *mutex, int64_t deadline) {
#ifdef __APPLE__ /* no monotonic condition variables there, but relative waits */
    int64_t left = deadline - cattn_now_ns();
    left = left > 0 ? left : 0;
    struct timespec t = {(time_t)(left / SECOND_NS), (long)(left % SECOND_NS)};
    pthread_cond_timedwait_relative_np(condition, mutex, &t);
#else
    struct timespec t = {(time_t)(deadline / SECOND_NS), (long)(deadline % SECOND_NS)};
    pthread_cond_timedwait(condition, mutex, &t);
#endif
}

void cattn_condition_signal(cattn_condition *condition) { pthread_cond_signal(condition); }
void cattn_condition_broadcast(cattn_condition *condition) { pthread_cond_broadcast(condition); }

void cattn_run_once(cattn_once *once, void (*function)(void)) { pthread_once(once, function); }

/* ---- threads ---- */

/* POSIX promises that a pointer to a function fits in a pointer to void. */
union run {
    void (*function)(void);
    void *argument;
};

static void *run_thread(void *argument) {
    union run run = {.argument = argument};
    run.function();
    return NULL;
}

bool cattn_thread_start(cattn_thread *thread, void (*function)(void)) {
    const union run run = {.function = function};
    sigset_t all, saved;
    sigfillset(&all);
    if (pthread_sigmask(SIG_SETMASK, &all, &saved) != 0)
        return false;
    const bool ok = pthread_create(thread, NULL, run_thread, run.argument) == 0;
    pthread_sigmask(SIG_SETMASK, &saved, NULL);
    return ok;
}

void cattn_thread_join(cattn_thread thread) { pthread_join(thread, NULL); }

bool cattn_thread_key_create(cattn_thread_key *key, void (*destructor)(void *)) {
    return pthread_key_create(key, destructor) == 0;
}

void *cattn_thread_key_get(cattn_thread_key key) { return pthread_getspecific(key); }
bool cattn_thread_key_set(cattn_thread_key key, void *value) { return pthread_setspecific(key, value) == 0; }

bool cattn_at_fork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void)) {
    return pthread_atfork(before, in_parent, in_child) == 0;
}

/* ---- memory ---- */

void *cattn_aligned_alloc(size_t alignment, size_t size) {
    void *memory;
    return posix_memalign(&memory, alignment, size) == 0 ? memory : NULL;
}

void cattn_aligned_free(void *memory) { free(memory); }

/* ---- time ---- */

int64_t cattn_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * SECOND_NS + t.tv_nsec;
}

void cattn_sleep_ns(int64_t nanoseconds) {
    const struct timespec t = {(time_t)(nanoseconds / SECOND_NS), (long)(nanoseconds % SECOND_NS)};
    nanosleep(&t, NULL);
}

/* ---- processors; os_linux.c knows more ---- */

#ifndef __linux__

int cattn_usable_cpus(void) {
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 && online < INT_MAX ? (int)online : 1;
}

#endif

#endif
