// Lets OpenMP's threads sleep, on cores that other programs want.

#define _DEFAULT_SOURCE
#include "instructions.h"

#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

static void *wait_for_mutex(void *mutex)
{
    pthread_mutex_lock(mutex);
    pthread_mutex_unlock(mutex);
    return NULL;
}

// Tell whether the system has room for more threads. OpenMP would end the process if it had none.
static int has_room(int threads)
{
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_t made[threads];
    int count = 0;
    pthread_mutex_lock(&mutex);
    while (count < threads && pthread_create(&made[count], NULL, wait_for_mutex, &mutex) == 0)
        count++;
    pthread_mutex_unlock(&mutex);
    for (int i = 0; i < count; i++)
        pthread_join(made[i], NULL);
    return count == threads;
}

static void *sleep_as_team(void *threads)
{
    int count = 0; // so that GCC does not remove the region
#pragma omp parallel num_threads((int)(intptr_t)threads)
#pragma omp atomic
    count++;
    for (;;)
        pause();
    return NULL;
}

// Let OpenMP's threads sleep soon when they wait for each other, from now on.
//
// GCC's OpenMP spins far less as soon as it has more threads than there are cores. This function
// therefore makes a second team, which sleeps, beside the team of `threads`.
EXPORT void let_threads_sleep(int threads)
{
    const int missing = omp_get_num_procs() - threads + 1;
    const int team = missing > 1 ? missing + 1 : 2;
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all); // the threads of Python handle signals
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (has_room(team + 1) &&
        pthread_create(&thread, NULL, sleep_as_team, (void *)(intptr_t)team) == 0)
        pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}
