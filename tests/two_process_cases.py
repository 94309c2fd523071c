"""All cases of parallel/test_two_processes.py in one group, since every launched process spends seconds on imports."""

import full_disk_cases
import position_cases
import tensor_parallel_cases


def main(folder, data):
    # The last kind leaves its processes with a watch over files and without groups.
    return {
        "models": tensor_parallel_cases.main(),
        "encodings": position_cases.main(folder, data),
        "saves": full_disk_cases.main(f"{folder}/saves"),
    }
