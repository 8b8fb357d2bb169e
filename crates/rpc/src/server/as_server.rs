//! The calls that the server makes by its own rights for a caller. Nothing else is done with them,
//! and none of it is counted as what a client did.

use std::sync::Arc;

use dray_core::{Context, FileId, FileSystem, Identity, OpenFile, OpenHow, Result};

/// The context for looking at things that the caller of `cx` may not be allowed to see. The answer
/// does not show them.
pub(crate) fn to_look(cx: &Context) -> Context {
    Context { cancel: None, ..own(cx) }
}

/// Opens a file for which something else than the rights of the caller of `cx` decides. A ticket
/// shows that the file was opened before, or the file is kept for clients that may come back. Flags
/// that ask for more than an access mode and a way of access are left out for every caller.
pub(crate) async fn open(
    fs: &dyn FileSystem,
    cx: &Context,
    id: FileId,
    how: OpenHow,
) -> Result<Arc<dyn OpenFile>> {
    fs.open(&own(cx), id, bare(how)).await
}

fn own(cx: &Context) -> Context {
    Context { who: Identity::system(), internal: true, reclaims: true, ..cx.uncounted() }
}

/// For what no call of a client is about.
pub(crate) fn of_nobody() -> Context {
    Context::system().uncounted()
}

fn bare(how: OpenHow) -> OpenHow {
    const BARE: i32 =
        libc::O_ACCMODE | libc::O_APPEND | libc::O_SYNC | libc::O_DIRECT | libc::O_DIRECTORY;
    OpenHow::new(how.flags & BARE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changes_something_or_hides_it_is_left_out() {
        let all = OpenHow { flags: i32::MAX, kill_set_id: true, with_attr: true };
        let bare = bare(all);
        assert!(!bare.truncates() && !bare.kill_set_id && bare.appends());
        let hides = libc::O_NOATIME | libc::O_CREAT | libc::O_EXCL | OpenHow::EXECUTE;
        assert_eq!(bare.flags & hides, 0);
    }
}
