"""What travels in a round: announcements to all, and the uploads, in three ways that give the same bits."""
