"""What maintainers run: the locks of the images, their bills of materials, tests against the newest releases."""
