/* The same rounds as `ours` in src/main.rs, by Open MPI. Prints a line a case: operation, bytes, seconds (median). */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, world;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    for (int i = 1; i + 3 < argc; i += 4) {
        const char *kind = argv[i];
        size_t bytes = strtoull(argv[i + 1], NULL, 10);
        int rounds = atoi(argv[i + 2]), repeat = atoi(argv[i + 3]);
        int n = (int)(bytes / sizeof(float));
        float *data = malloc(bytes), *into = malloc(bytes);
        double *times = malloc(rounds * sizeof(double));
        int reduce = strcmp(kind, "all_reduce") == 0;
        memset(into, 0, bytes);
        for (int r = -1; r < rounds; r++) {
            for (int k = 0; k < n; k++) data[k] = (float)(k % 7 + rank);
            MPI_Barrier(MPI_COMM_WORLD);
            double begin = MPI_Wtime();
            for (int k = 0; k < repeat; k++) {
                if (reduce)
                    MPI_Allreduce(MPI_IN_PLACE, data, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                else
                    MPI_Alltoall(data, n / world, MPI_FLOAT, into, n / world, MPI_FLOAT, MPI_COMM_WORLD);
            }
            if (r >= 0) times[r] = (MPI_Wtime() - begin) / repeat;
        }
        qsort(times, rounds, sizeof(double), by_value);
        if (rank == 0) printf("%s %zu %.9f\n", kind, bytes, times[rounds / 2]);
        free(data), free(into), free(times);
    }
    MPI_Finalize();
    return 0;
}
