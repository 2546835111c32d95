"""How weights lie on the device, and the arithmetic on them. Read `layout` first, then `superblock`."""
