"""A module that never ends to be imported."""

import time

time.sleep(600)
