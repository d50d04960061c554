# What a module was compiled from, as setup.py says it: protocol.process.compiled.checksum().

cdef extern from *:
    """
    #ifndef MODELCTL_SOURCES
    #define MODELCTL_SOURCES 0
    #endif
    """
    const unsigned int MODELCTL_SOURCES
