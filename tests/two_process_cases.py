"""All cases of parallel/test_two_processes.py in one process group, since imports take seconds per
process.
"""

import full_disk_cases
import position_cases
import tensor_parallel_cases


def main(folder, data):
    # Last, since processes leave their groups.
    return {
        "models": tensor_parallel_cases.main(),
        "encodings": position_cases.main(folder, data),
        "saves": full_disk_cases.main(f"{folder}/saves"),
    }
