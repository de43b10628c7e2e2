"""Ray for one `tandem up`: what of it starts, and how its workers do."""
