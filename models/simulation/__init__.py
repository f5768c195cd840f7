"""What decoding would accept of finished answers, computed without decoding: a metric of heads."""
