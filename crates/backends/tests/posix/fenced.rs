//! A server that was stopped has been succeeded when it goes on. Its backend changes nothing then.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use crate::rig::*;
use dray_core::*;

#[derive(Debug, Default)]
struct Right {
    ended: AtomicBool,
    asked_by: Mutex<Vec<ThreadId>>,
}

impl Fence for Right {
    fn holds(&self) -> bool {
        self.asked_by.lock().unwrap().push(thread::current().id());
        !self.ended.load(Ordering::SeqCst)
    }
}

/// An append that waited for a thread, of a server that was stopped then, came behind those of its successor.
// proves: P147
#[test]
fn a_change_is_not_made_once_another_server_may_make_it() {
    on_each(&Kind::ALL, async |kit| {
        let right = Arc::new(Right::default());
        let cx = &Context { fence: Some(right.clone()), ..kit.root_user.clone() };
        let dir = kit.common("d").await;
        let id = kit.file(cx, dir, "file", 0o600, b"before").await;
        let file = kit.fs.open(cx, id, OpenHow::READ_WRITE).await.unwrap();
        right.ended.store(true, Ordering::SeqCst);
        for sync in [false, true] {
            for append in [false, true] {
                let how = Write { at: 0, append, sync, ..Write::default() };
                let written = file.write(cx, how, Buf::from(&b"late"[..])).await;
                assert_eq!(errno(written), Errno::EAGAIN);
            }
        }
        let size = SetAttr { size: Some(0), ..SetAttr::default() };
        assert_eq!(errno(file.setattr(cx, size).await), Errno::EAGAIN);
        assert_eq!(errno(kit.fs.setattr(cx, id, size).await), Errno::EAGAIN);
        let what = Allocate { flags: 0, at: 0, len_bytes: 99 };
        assert_eq!(errno(file.allocate(cx, what).await), Errno::EAGAIN);
        assert_eq!(errno(kit.create(cx, dir, "late", 0o600).await), Errno::EAGAIN);
        assert_eq!(errno(kit.mkdir(cx, dir, "late", 0o700).await), Errno::EAGAIN);
        assert_eq!(errno(kit.unlink(cx, dir, "file").await), Errno::EAGAIN);
        let (from, to) = ((dir, "file"), (dir, "late"));
        assert_eq!(errno(kit.rename(cx, from, to, RenameHow::Replace).await), Errno::EAGAIN);
        assert_eq!(errno(kit.fs.link(cx, id, dir, name("late")).await), Errno::EAGAIN);
        let root = &kit.root_user;
        assert_eq!(get(root, &*file, 0, 99).await.unwrap(), b"before");
        assert_eq!(errno(kit.lookup(root, dir, "late").await), Errno::ENOENT);
    });
}

/// The check comes behind the wait for a thread, and not before it.
// proves: P147
#[test]
fn the_thread_that_makes_a_change_looks_whether_it_still_may() {
    on_each(&[Kind::Ext4], async |kit| {
        let right = Arc::new(Right::default());
        let cx = &Context { fence: Some(right.clone()), ..kit.root_user.clone() };
        let dir = kit.common("d").await;
        let (_, file) = kit.create(cx, dir, "file", 0o600).await.unwrap();
        right.asked_by.lock().unwrap().clear();
        let how = Write { append: true, sync: true, ..Write::default() };
        file.write(cx, how, Buf::from(&b"data"[..])).await.unwrap();
        let asked_by = right.asked_by.lock().unwrap();
        let last = asked_by.last().expect("the right was looked at");
        assert_ne!(*last, thread::current().id(), "a synced write is made by a thread of a lane");
    });
}
