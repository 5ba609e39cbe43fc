"""Rails between the nodes of a topology: what carries puts and notifications to ranks whose memory is out of reach."""
