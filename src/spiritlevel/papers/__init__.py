"""What the three papers need: claims, studies, networks, training, many machines."""
