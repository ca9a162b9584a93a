"""Programs to copy from; the ones in ``paper`` reproduce the papers' figures. Not installed: they run in a clone."""
