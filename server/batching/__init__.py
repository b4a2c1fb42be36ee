"""Who runs next, with whom, and when: admission, queue, batcher, and the one thread that owns the device."""
