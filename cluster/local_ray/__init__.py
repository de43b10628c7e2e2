"""Ray for one `tandem up`: the parts that start, and how its workers start."""
