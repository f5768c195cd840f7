"""Methods side by side: interleaved timing that resumes."""
