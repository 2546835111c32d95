"""Files and folders: written whole or not at all, locked while in use. Read `files` first.

outputs                what a command writes, and what it must not replace
folder_locks           folders that a process works in
cache, kernel_cache    what is kept between runs
"""
