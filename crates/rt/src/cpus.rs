//! Which CPUs threads may use, on machines of any size. The C library's `cpu_set_t` ends at 1,024,
//! and the kernel refuses to answer into a set that is smaller than its own.

use std::io;

/// A word of a set (sched_setaffinity(2)).
type Word = libc::c_ulong;

/// A set that fits nearly everywhere; doubled where it does not.
const SET_BYTES: usize = 128;
/// More CPUs than any kernel is built for (`CONFIG_NR_CPUS`).
const SET_MAX_BYTES: usize = 8 << 10;

/// CPUs by number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuSet(Vec<Word>);

impl CpuSet {
    /// The CPUs that the calling thread may use. Errors: those of sched_getaffinity(2).
    pub fn allowed() -> io::Result<CpuSet> {
        CpuSet::asked(|words| {
            // SAFETY: the kernel writes at most as many bytes as the words have.
            match unsafe {
                libc::sched_getaffinity(0, size_of_val(words), words.as_mut_ptr().cast())
            } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        })
    }

    /// Asks with larger and larger sets.
    fn asked(mut ask: impl FnMut(&mut [Word]) -> io::Result<()>) -> io::Result<CpuSet> {
        let mut bytes = SET_BYTES;
        loop {
            let mut words = vec![0; bytes / size_of::<Word>()];
            match ask(&mut words) {
                Ok(()) => return Ok(CpuSet(words)),
                Err(error)
                    if error.raw_os_error() == Some(libc::EINVAL) && bytes < SET_MAX_BYTES =>
                {
                    bytes *= 2;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The set of this CPU alone; an empty set for a CPU beyond all that can be.
    pub fn only(cpu: usize) -> CpuSet {
        let bits = Word::BITS as usize;
        if cpu / 8 >= SET_MAX_BYTES {
            return CpuSet(vec![0; SET_BYTES / size_of::<Word>()]);
        }
        let words = (cpu / bits + 1).max(SET_BYTES / size_of::<Word>());
        let mut words = vec![0; words];
        words[cpu / bits] = 1 << (cpu % bits);
        CpuSet(words)
    }

    /// The numbers of the CPUs, lowest first.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        let bits = Word::BITS as usize;
        let is_in = move |cpu: &usize| self.0[cpu / bits] >> (cpu % bits) & 1 != 0;
        (0..self.0.len() * bits).filter(is_in)
    }

    /// Keeps the calling thread on them. Errors: those of sched_setaffinity(2); `EINVAL` if none
    /// of them can be used.
    pub fn pin(&self) -> io::Result<()> {
        self.pin_thread(0)
    }

    /// Keeps a thread of this process on them, by its number; 0 is the calling one. Errors: as [`CpuSet::pin`].
    pub(crate) fn pin_thread(&self, tid: libc::pid_t) -> io::Result<()> {
        let bytes = size_of_val(&*self.0);
        // SAFETY: the kernel reads as many bytes as the words have.
        match unsafe { libc::sched_setaffinity(tid, bytes, self.0.as_ptr().cast()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// The CPU that the calling thread runs on now; none where the kernel does not say.
pub(crate) fn current_cpu() -> Option<usize> {
    // SAFETY: no memory is passed.
    usize::try_from(unsafe { libc::sched_getcpu() }).ok()
}

/// The number of the calling thread.
pub(crate) fn this_thread() -> libc::pid_t {
    // SAFETY: no memory is passed.
    unsafe { libc::gettid() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kernel for 4,096 CPUs refuses to answer into less than 512 bytes. A mount had one worker
    /// there, and a server one thread.
    #[test]
    fn machines_of_more_than_a_thousand_cpus_are_seen_whole() {
        let set = CpuSet::asked(|words| {
            if size_of_val(words) < 512 {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            words[0] = 2;
            words[2000 / 64] = 1 << (2000 % 64);
            Ok(())
        });
        assert_eq!(set.unwrap().iter().collect::<Vec<_>>(), [1, 2000]);
        assert_eq!(CpuSet::only(2000).iter().collect::<Vec<_>>(), [2000]);
        assert_eq!(CpuSet::only(usize::MAX).iter().count(), 0);
        let never = |_: &mut [Word]| Err(io::Error::from_raw_os_error(libc::EINVAL));
        assert_eq!(CpuSet::asked(never).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn a_thread_stays_where_it_is_pinned() {
        let pinned = std::thread::spawn(|| {
            let first = CpuSet::allowed().unwrap().iter().next().unwrap();
            CpuSet::only(first).pin().unwrap();
            assert!(CpuSet::only(usize::MAX).pin().is_err());
            CpuSet::allowed().unwrap().iter().eq([first])
        });
        assert!(pinned.join().unwrap());
    }
}
