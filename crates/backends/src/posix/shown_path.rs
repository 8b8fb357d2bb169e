//! Paths of files, to be shown to people: what the kernel says of a descriptor, from the export's root
//! on.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;

use dray_core::FileId;

use super::core::Core;
use super::cred;

impl Core {
    /// Where `id` is; none where it is not below the root any more, or the kernel does not
    /// know of the directories above it. May wait for the file system if the file is not at
    /// hand.
    pub(crate) fn path(&self, id: FileId) -> Option<Vec<u8>> {
        let find = || {
            let root = link_of(self.mount_fd())?;
            let path = match self.files.any_descriptor(id) {
                Some(fd) => link_of((*fd).as_fd()),
                None => link_of(self.node(id).ok()?.fd()),
            };
            below(&root, path?)
        };
        cred::as_server(find).ok()?
    }
}

pub(super) fn link_of(fd: BorrowedFd<'_>) -> Option<Vec<u8>> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
    Some(link.into_os_string().into_vec())
}

/// What is left of `path` below `root`, with its slash.
fn below(root: &[u8], path: Vec<u8>) -> Option<Vec<u8>> {
    let rest = match root {
        b"/" => &path[..],
        root => path.strip_prefix(root)?,
    };
    match rest {
        [] => Some(b"/".to_vec()),
        [b'/', ..] => Some(rest.to_vec()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_begin_at_the_root_of_the_export() {
        let below = |root: &str, path: &str| below(root.as_bytes(), path.into());
        assert_eq!(below("/srv", "/srv/a/b"), Some(b"/a/b".to_vec()));
        assert_eq!(below("/srv", "/srv"), Some(b"/".to_vec()));
        assert_eq!(below("/", "/a"), Some(b"/a".to_vec()));
        assert_eq!(below("/srv", "/srv2/a"), None);
        assert_eq!(below("/srv", "/b"), None);
    }
}
