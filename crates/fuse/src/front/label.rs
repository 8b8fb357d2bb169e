//! Labels of SELinux on a client whose kernel has no SELinux.
//!
//! ls(1) asks for the label of each file. Where it hears that there are none (EOPNOTSUPP), it asks for no more on that
//! device. ENODATA says that this one file has none, and costs a request for each file. No kernel remembers
//! labels of FUSE. NFS without labels answers EOPNOTSUPP, too. Who asks for the label of a file that has one is shown it.

use std::fs;
use std::sync::LazyLock;

use dray_core::{Errno, Error};

/// The attribute that has the label.
const NAME: &[u8] = b"security.selinux";

/// Whether the kernel has SELinux. That is decided when the kernel starts. Where nothing is known, it has.
static KERNEL_HAS_LABELS: LazyLock<bool> = LazyLock::new(|| {
    fs::read_to_string("/proc/filesystems").map_or(true, |known| has_selinux(&known))
});

/// Whether SELinux's own file system is among those of `/proc/filesystems`.
fn has_selinux(file_systems: &str) -> bool {
    file_systems.lines().any(|line| line.split_whitespace().last() == Some("selinuxfs"))
}

/// The answer to who has asked for the attribute `name`, in place of this error.
pub(crate) fn absent(name: &[u8], error: Error) -> Error {
    absent_at(*KERNEL_HAS_LABELS, name, error)
}

fn absent_at(kernel_has_labels: bool, name: &[u8], error: Error) -> Error {
    match name == NAME && error.errno() == Errno::ENODATA && !kernel_has_labels {
        true => Errno::ENOTSUP.into(),
        false => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves: P338
    #[test]
    fn a_label_that_a_file_lacks_is_not_supported_where_the_kernel_has_no_selinux() {
        let answer = |has_labels, name: &[u8], errno: Errno| {
            absent_at(has_labels, name, errno.into()).errno()
        };
        assert_eq!(answer(false, NAME, Errno::ENODATA), Errno::ENOTSUP);
        assert_eq!(answer(true, NAME, Errno::ENODATA), Errno::ENODATA);
        assert_eq!(answer(false, NAME, Errno::EACCES), Errno::EACCES);
        assert_eq!(answer(false, b"security.capability", Errno::ENODATA), Errno::ENODATA);
    }

    #[test]
    fn a_kernel_with_selinux_says_so() {
        assert!(has_selinux("nodev\tsysfs\nnodev\tselinuxfs\n\text4\n"));
        assert!(!has_selinux("nodev\tsysfs\n\text4\nnodev\tfuse\n"));
    }
}
