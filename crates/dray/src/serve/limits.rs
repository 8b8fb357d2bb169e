//! Resource limits of the server process (setrlimit(2)) that its clients would use up.

/// Lifts those whose end is the server's. Clients decide how much time it takes. The kernel kills a
/// process that has used up the hard limit. Says which of them, or a limit on what it writes, is
/// there to stay.
pub fn begin() {
    for (limit, name) in [
        (libc::RLIMIT_CPU, "CPU time (LimitCPU, ulimit -t)"),
        (libc::RLIMIT_RTTIME, "time under a real-time policy (LimitRTTIME, ulimit -R)"),
    ] {
        if !is_lifted(limit) {
            log::warn!("the kernel will kill this server: it has a limit on its {name}; lift it");
        }
    }
    let bytes = current(libc::RLIMIT_FSIZE).rlim_cur;
    if bytes != libc::RLIM_INFINITY {
        log::warn!(
            "files can have {bytes} bytes at most: what clients write beyond that fails with EFBIG \
             (LimitFSIZE, ulimit -f)"
        );
    }
}

/// Whether there is no such limit any more.
fn is_lifted(limit: libc::__rlimit_resource_t) -> bool {
    let none = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the struct outlives the call.
    current(limit).rlim_max == libc::RLIM_INFINITY && current(limit).rlim_cur == libc::RLIM_INFINITY
        || unsafe { libc::setrlimit(limit, &none) } == 0
}

fn current(limit: libc::__rlimit_resource_t) -> libc::rlimit {
    let mut now = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the struct outlives the call; where that fails it says that there is none.
    unsafe { libc::getrlimit(limit, &mut now) };
    now
}
