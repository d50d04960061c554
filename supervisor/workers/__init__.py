"""Worker processes: how they are started, watched, ended, told apart by how they ended, and swept when left behind."""
