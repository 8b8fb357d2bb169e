//! Bringing the idle entries of a ring together, so that the daemon can give their memory back.

use std::io;
use std::path::Path;

use crate::mount::wake::{MountQuestion, ask};
use crate::options::RING_SPARES_MAX;
use crate::transport::queues::possible_cpus;
use crate::worker::cpus;

/// What is asked for: the length of an attribute that no file has. The daemon answers with the
/// number of entries that it wants to come together on this CPU. It keeps as many further questions
/// waiting for each other.
///
/// The attribute keeps its first name: supervisor and daemon may be of different versions.
pub(crate) const ATTRIBUTE: &[u8] = b"system.dray.gather";
const ATTRIBUTE_C: &std::ffi::CStr = c"system.dray.gather";
/// Most questions at once: more entries than a queue can have by itself and by spares.
const AT_ONCE_MAX: usize = 2 * RING_SPARES_MAX;

/// Asks the mount at `at` on each CPU that this process may run on, one after the other. It asks as
/// often at once as the mount's daemon wants it.
///
/// For a process that has nothing else to do and is no daemon: it waits as any application
/// does. Errors: those of reading the list of CPUs and of starting threads.
pub fn reclaim_entries(at: &Path) -> io::Result<()> {
    let asking = MountQuestion::new(at, ATTRIBUTE_C)?;
    for cpu in 0..possible_cpus()? {
        std::thread::scope(|scope| {
            let asking = &asking;
            let on_cpu = std::thread::Builder::new().spawn_scoped(scope, move || {
                // Where we may not run, payloads keep their memory.
                if cpus::pin_to(cpu).is_ok() { reclaim_here(asking) } else { Ok(()) }
            })?;
            on_cpu.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
        })?;
    }
    Ok(())
}

/// On the CPU of this thread, which those that it starts inherit.
fn reclaim_here(asking: &MountQuestion) -> io::Result<()> {
    let wanted = ask(asking).unwrap_or(0).min(AT_ONCE_MAX);
    std::thread::scope(|scope| {
        for _ in 0..wanted {
            std::thread::Builder::new().spawn_scoped(scope, || ask(asking))?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_attribute_has_one_name() {
        assert_eq!(ATTRIBUTE, ATTRIBUTE_C.to_bytes());
    }
}
