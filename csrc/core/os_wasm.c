/* os_wasm.c -- the functions of os.h in WebAssembly, where a module has one thread and no signals. */
#include "os.h"

#ifdef __wasm__

#include <stdlib.h>

/* ---- locks: nobody else is there to be kept out ---- */

void cattn_mutex_init(cattn_mutex *mutex) { *mutex = 0; }
void cattn_mutex_destroy(cattn_mutex *mutex) { (void)mutex; }
void cattn_mutex_lock(cattn_mutex *mutex) { (void)mutex; }
void cattn_mutex_unlock(cattn_mutex *mutex) { (void)mutex; }

bool cattn_condition_init(cattn_condition *condition) {
    *condition = 0;
    return true;
}

void cattn_condition_destroy(cattn_condition *condition) { (void)condition; }
void cattn_condition_wait(cattn_condition *condition, cattn_mutex *mutex) { (void)condition, (void)mutex; }

void cattn_condition_wait_until(cattn_condition *condition, cattn_mutex *mutex, int64_t deadline) {
    (void)condition, (void)mutex, (void)deadline;
}

void cattn_condition_signal(cattn_condition *condition) { (void)condition; }
void cattn_condition_broadcast(cattn_condition *condition) { (void)condition; }

void cattn_run_once(cattn_once *once, void (*function)(void)) {
    if (*once == 0) {
        *once = 1;
        function();
    }
}

/* ---- threads: none can be started, so that every call runs on the caller's ---- */

bool cattn_thread_start(cattn_thread *thread, void (*run)(void)) {
    (void)thread, (void)run;
    return false;
}

void cattn_thread_join(cattn_thread thread) { (void)thread; }

/* The values of the one thread, which never ends. */
static void *values[4];
static int n_values;

bool cattn_thread_key_create(cattn_thread_key *key, void (*destructor)(void *)) {
    (void)destructor;
    *key = n_values;
    return n_values++ < (int)(sizeof values / sizeof *values);
}

void *cattn_thread_key_get(cattn_thread_key key) { return values[key]; }

bool cattn_thread_key_set(cattn_thread_key key, void *value) {
    values[key] = value;
    return true;
}

bool cattn_at_fork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void)) {
    (void)before, (void)in_parent, (void)in_child;
    return true;
}

/* ---- memory ---- */

void *cattn_aligned_alloc(size_t alignment, size_t size) {
    void *memory;
    return posix_memalign(&memory, alignment, size) == 0 ? memory : NULL;
}

void cattn_aligned_free(void *memory) { free(memory); }

/* ---- time: it stands still, so that no call polls; a page runs each call to its end ---- */

int64_t cattn_now_ns(void) { return 0; }

/* ---- processors ---- */

int cattn_usable_cpus(void) { return 1; }

#endif
