"""What travels in a round: announcements to all, and the uploads, in four ways."""
