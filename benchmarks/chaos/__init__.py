"""Does training stay fast and right while workers, shards, hosts and disks fail?"""
