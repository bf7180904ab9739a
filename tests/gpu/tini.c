/* Runs a command as its subreaper: tini COMMAND... Orphans below it come to it and are reaped.
 * Only for machines whose pid 1 is an interpreter or adopts nothing: there a detached server would look like a
 * child of a living program. A container's init of this name does the same. */
#include <errno.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    int status;
    pid_t child, ended;

    if (argc < 2 || prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) {
        perror("tini");
        return 2;
    }
    child = fork();
    if (child == 0) {
        execvp(argv[1], argv + 1);
        _exit(127);
    }
    for (;;) {
        ended = waitpid(-1, &status, 0);
        if (ended == child)
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        if (ended < 0 && errno != EINTR)
            return 2;
    }
}
