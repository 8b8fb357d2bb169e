//! The file system below decides, for the caller.

use crate::rig::*;
use dray_backends::posix::{PosixOptions, Squash};
use dray_core::*;

// proves: P44
#[test]
fn users_are_who_they_are() {
    on_each(&Kind::ALL, async |kit| {
        let (ann, bob, root) = (user(1000, 1000, &[]), user(1001, 1001, &[]), &kit.root_user);
        let dir = kit.common("d").await;
        let secret = kit.file(&ann, dir, "secret", 0o600, b"s").await;
        let attr = kit.fs.getattr(&bob, secret).await.unwrap();
        assert_eq!((attr.uid, attr.gid), (Uid(1000), Gid(1000)));
        assert_eq!(errno(kit.fs.open(&bob, secret, OpenHow::READ).await), Errno::EACCES);
        assert_eq!(errno(kit.fs.access(&bob, secret, Access(4)).await), Errno::EACCES);
        kit.fs.access(&ann, secret, Access(6)).await.unwrap();
        assert_eq!(errno(kit.fs.access(&ann, secret, Access(1)).await), Errno::EACCES);
        kit.fs.open(root, secret, OpenHow::READ).await.unwrap();
        let mode = SetAttr { mode: Some(0o644), ..SetAttr::default() };
        assert_eq!(errno(kit.fs.setattr(&bob, secret, mode).await), Errno::EPERM);
        let size = SetAttr { size: Some(0), ..SetAttr::default() };
        assert_eq!(errno(kit.fs.setattr(&bob, secret, size).await), Errno::EACCES);
        let own = SetAttr { uid: Some(Uid(1001)), ..SetAttr::default() };
        assert_eq!(errno(kit.fs.setattr(&ann, secret, own).await), Errno::EPERM);
        kit.fs.setattr(&ann, secret, mode).await.unwrap();
        kit.fs.open(&bob, secret, OpenHow::READ).await.unwrap();
        assert_eq!(errno(kit.fs.open(&bob, secret, OpenHow::READ_WRITE).await), Errno::EACCES);
        // A directory that may not be searched hides what is in it, by name.
        let closed = kit.mkdir(&ann, dir, "closed", 0o700).await.unwrap().id;
        kit.file(&ann, closed, "f", 0o666, b"").await;
        assert_eq!(errno(kit.lookup(&bob, closed, "f").await), Errno::EACCES);
        assert_eq!(errno(kit.create(&bob, closed, "g", 0o666).await), Errno::EACCES);
        assert_eq!(errno(kit.unlink(&bob, closed, "f").await), Errno::EACCES);
        let device = Make::Node { mode: libc::S_IFCHR | 0o666, rdev: 0x103 };
        assert_eq!(errno(kit.fs.make(&ann, dir, name("dev"), device).await), Errno::EPERM);
    });
}

/// The right to run a program was enough to empty it. What took only that right was opened as the
/// server, with all the flags that came along.
// proves: P48
#[test]
fn the_right_to_run_a_program_changes_nothing_of_it() {
    let run = |flags: i32| OpenHow::new(OpenHow::EXECUTE | flags);
    on_each(&Kind::ALL, async |kit| {
        let (bob, root) = (user(1001, 1001, &[]), &kit.root_user);
        let dir = kit.common("d").await;
        let id = kit.file(root, dir, "program", 0o711, b"program").await;
        for flags in [libc::O_TRUNC, libc::O_APPEND | libc::O_TRUNC, libc::O_NOATIME] {
            assert_eq!(errno(kit.fs.open(&bob, id, run(flags)).await), Errno::EACCES, "{flags:o}");
            let how = CreateHow { open: run(flags), mode: 0o666, exclusive: false };
            let created = kit.fs.create(&bob, dir, name("program"), how).await;
            assert_eq!(errno(created), Errno::EACCES, "{flags:o}");
        }
        // A user who may read the file does not become its owner by running it.
        let open = kit.file(root, dir, "script", 0o755, b"script").await;
        assert_eq!(errno(kit.fs.open(&bob, open, run(libc::O_NOATIME)).await), Errno::EPERM);
        const O_LARGEFILE: i32 = 0o100_000; // as the kernel opens programs
        for flags in [0, O_LARGEFILE] {
            let file = kit.fs.open(&bob, id, run(flags)).await.unwrap();
            assert_eq!(get(&bob, &*file, 0, 99).await.unwrap(), b"program");
            assert_eq!(errno(put(&bob, &*file, 0, b"x").await), Errno::EBADF);
            let size = SetAttr { size: Some(0), ..SetAttr::default() };
            assert_eq!(errno(file.setattr(&bob, size).await), Errno::EINVAL);
            let what = Allocate { flags: 0, at: 0, len_bytes: 9 };
            assert_eq!(errno(file.allocate(&bob, what).await), Errno::EBADF);
            let (_, own) = kit.create(&bob, dir, &format!("own{flags}"), 0o600).await.unwrap();
            assert_eq!(errno(own.copy_range(&bob, 0, &*file, 0, 1).await), Errno::EBADF);
        }
        let file = kit.fs.open(root, id, OpenHow::READ).await.unwrap();
        assert_eq!(get(root, &*file, 0, 99).await.unwrap(), b"program");
    });
}

/// A file that was created at one server of a projection is opened at another one. The mode that it was
/// created with does not limit its creator, and gives nobody else anything.
// proves: P48
#[test]
fn the_owner_alone_opens_as_the_creator() {
    let created = |flags: i32| OpenHow::new(flags).of_created();
    on_each(&Kind::ALL, async |kit| {
        let (ann, bob) = (user(1000, 1000, &[]), user(1001, 1001, &[]));
        let dir = kit.common("d").await;
        let id = kit.file(&ann, dir, "f", 0o000, b"data").await;
        assert_eq!(errno(kit.fs.open(&ann, id, OpenHow::READ_WRITE).await), Errno::EACCES);
        assert_eq!(errno(kit.fs.open(&bob, id, created(libc::O_RDWR)).await), Errno::EACCES);
        let file = kit.fs.open(&ann, id, created(libc::O_RDWR)).await.unwrap();
        put(&ann, &*file, 4, b" more").await.unwrap();
        assert_eq!(get(&ann, &*file, 0, 99).await.unwrap(), b"data more");
        let file = kit.fs.open(&ann, id, created(libc::O_RDONLY)).await.unwrap();
        assert_eq!(errno(put(&ann, &*file, 0, b"x").await), Errno::EBADF);
        let cut = OpenHow::new(libc::O_RDWR | libc::O_TRUNC | OpenHow::CREATOR);
        assert_eq!(errno(kit.fs.open(&ann, id, cut).await), Errno::EACCES);
        let closed = kit.mkdir(&ann, dir, "closed", 0o000).await.unwrap().id;
        let how = created(libc::O_RDONLY | libc::O_DIRECTORY);
        assert_eq!(errno(kit.fs.open(&ann, closed, how).await), Errno::EACCES);
    });
}

// proves: P44
#[test]
fn supplementary_groups_count() {
    on_each(&Kind::ALL, async |kit| {
        let dir = kit.common("d").await;
        let id = kit.file(&user(1000, 2000, &[]), dir, "f", 0o640, b"g").await;
        let member = user(1001, 1001, &[5, 2000, 3000]);
        kit.fs.open(&member, id, OpenHow::READ).await.unwrap();
        let other_user = user(1001, 1001, &[5, 3000]);
        assert_eq!(errno(kit.fs.open(&other_user, id, OpenHow::READ).await), Errno::EACCES);
        kit.fs.open(&member, id, OpenHow::READ).await.unwrap();
        let chgrp = SetAttr { gid: Some(Gid(3000)), ..SetAttr::default() };
        kit.fs.setattr(&user(1000, 2000, &[3000]), id, chgrp).await.unwrap();
        kit.fs.open(&other_user, id, OpenHow::READ).await.unwrap();
    });
}

/// Two users in 1,024 groups each that took turns had the thread that serves everybody sort their
/// groups, half a millisecond for each call.
// proves: P132
#[test]
fn a_serving_thread_becomes_nobody_in_many_groups() {
    let Some(disk) = Disk::new(Kind::Tmpfs, 16) else { return };
    on(&disk, plain(), async |kit| {
        let dir = kit.common("d").await;
        let id = kit.file(&user(1000, 2000, &[]), dir, "f", 0o640, b"data").await;
        let groups = || {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let line = status.lines().find(|line| line.starts_with("Groups:")).unwrap();
            line.split_ascii_whitespace().count() - 1
        };
        let few: Vec<u32> = (0..8).map(|number| 1993 + number).collect();
        let open = async |uid, groups: &[u32]| {
            let cx = user(uid, uid, groups);
            let file = kit.fs.open(&cx, id, OpenHow::READ).await?;
            get(&cx, &*file, 0, 9).await.map(|data| assert_eq!(data, b"data"))?;
            file.close(&cx).await
        };
        open(1001, &few).await.unwrap();
        assert_eq!(groups(), 8);
        for uid in [1002, 1003, 1002] {
            let many: Vec<u32> = (0..1000).map(|number| 1500 + number).collect();
            open(uid, &many).await.unwrap();
            assert_eq!(groups(), 8, "it became a user in many groups");
            let others: Vec<u32> = (0..1000).map(|number| 2001 + number).collect();
            assert_eq!(open(uid, &others).await.unwrap_err().errno(), Errno::EACCES);
        }
    });
}

// proves: P45
#[test]
fn sticky_and_setgid_directories() {
    on_each(&Kind::ALL, async |kit| {
        let (ann, bob, root) = (user(1000, 1000, &[]), user(1001, 1001, &[]), &kit.root_user);
        let sticky = kit.mkdir(root, kit.root, "sticky", 0o1777).await.unwrap();
        assert_eq!(sticky.attr.mode & 0o7777, 0o1777);
        kit.file(&ann, sticky.id, "f", 0o666, b"").await;
        assert_eq!(errno(kit.unlink(&bob, sticky.id, "f").await), Errno::EPERM);
        let moved = kit.rename(&bob, (sticky.id, "f"), (sticky.id, "g"), RenameHow::Replace).await;
        assert_eq!(errno(moved), Errno::EPERM);
        kit.unlink(&ann, sticky.id, "f").await.unwrap();

        let shared = kit.common("shared").await;
        let set = SetAttr { gid: Some(Gid(2000)), mode: Some(0o2777), ..SetAttr::default() };
        kit.fs.setattr(root, shared, set).await.unwrap();
        let (entry, _file) = kit.create(&ann, shared, "f", 0o2755).await.unwrap();
        assert_eq!(entry.attr.gid, Gid(2000));
        assert_eq!(entry.attr.mode & libc::S_ISGID, 0, "not a member: no set-gid program");
        let below = kit.mkdir(&ann, shared, "d", 0o755).await.unwrap();
        assert_eq!((below.attr.gid, below.attr.mode & libc::S_ISGID), (Gid(2000), libc::S_ISGID));
    });
}

// proves: P45
#[test]
fn umask_or_default_acl_as_the_kernel_has_it() {
    // user::rw-, group::rw-, mask::rw-, other::r--
    let mut acl = 2u32.to_le_bytes().to_vec();
    for (tag, bits) in [(1u16, 6u16), (4, 6), (0x10, 6), (0x20, 4)] {
        acl.extend(tag.to_le_bytes());
        acl.extend(bits.to_le_bytes());
        acl.extend(u32::MAX.to_le_bytes());
    }
    on_each(&Kind::NATIVE, async |kit| {
        let dir = kit.common("d").await;
        let mut cx = user(1000, 1000, &[]);
        for (number, umask) in [0o022, 0o077, 0].into_iter().enumerate() {
            cx.umask = umask;
            let (entry, _file) = kit.create(&cx, dir, &format!("f{number}"), 0o666).await.unwrap();
            assert_eq!(entry.attr.mode & 0o777, 0o666 & !umask);
        }
        let how = XattrSet::Any;
        let set = kit.fs.setxattr(&cx, dir, b"system.posix_acl_default", &acl, how).await;
        assert_eq!(errno(set), Errno::EPERM, "not the owner");
        let root = &kit.root_user;
        kit.fs.setxattr(root, dir, b"system.posix_acl_default", &acl, how).await.unwrap();
        let back = kit.fs.getxattr(root, dir, b"system.posix_acl_default").await.unwrap();
        assert_eq!(back, acl);
        cx.umask = 0o077;
        let (entry, _file) = kit.create(&cx, dir, "acl", 0o666).await.unwrap();
        assert_eq!(entry.attr.mode & 0o777, 0o664, "the umask is ignored");
    });
}

// proves: P46
#[test]
fn set_id_bits_fall_with_a_write() {
    on_each(&Kind::ALL, async |kit| {
        let (ann, root) = (user(1000, 1000, &[]), &kit.root_user);
        let dir = kit.common("d").await;
        let set = SetAttr { mode: Some(0o6777), ..SetAttr::default() };
        let mode = async |id| kit.fs.getattr(root, id).await.unwrap().mode & 0o7777;
        for n in ["write", "truncate", "chown", "kill"] {
            let id = kit.file(root, dir, n, 0o777, b"program").await;
            kit.fs.setattr(root, id, set).await.unwrap();
            assert_eq!(mode(id).await, 0o6777);
            let file = kit.fs.open(&ann, id, OpenHow::READ_WRITE).await.unwrap();
            let kill = Write { kill_set_id: true, ..Write::at(0) };
            match n {
                "write" => drop(put(&ann, &*file, 0, b"x").await.unwrap()),
                "kill" => drop(file.write(root, kill, Buf::from(&b"x"[..])).await.unwrap()),
                "truncate" => {
                    let size = SetAttr { size: Some(1), ..SetAttr::default() };
                    file.setattr(&ann, size).await.unwrap();
                }
                _ => {
                    let owner = SetAttr { uid: Some(Uid(5)), ..SetAttr::default() };
                    kit.fs.setattr(root, id, owner).await.unwrap();
                }
            }
            assert_eq!(mode(id).await, 0o777, "{n}");
        }
        // The super-user's own write does not.
        let id = kit.file(root, dir, "root", 0o777, b"program").await;
        kit.fs.setattr(root, id, set).await.unwrap();
        let file = kit.fs.open(root, id, OpenHow::READ_WRITE).await.unwrap();
        put(root, &*file, 0, b"x").await.unwrap();
        assert_eq!(mode(id).await, 0o6777);
    });
}

// proves: P51
#[test]
fn attributes_that_give_rights_are_the_super_users() {
    // VFS_CAP_REVISION_2, effective, CAP_SETUID
    let mut capability = 0x0200_0001u32.to_le_bytes().to_vec();
    capability.extend([1 << 7, 0, 0, 0].iter().flat_map(|word: &u32| word.to_le_bytes()));
    on_each(&Kind::NATIVE, async |kit| {
        let (ann, root, any) = (user(1000, 1000, &[]), &kit.root_user, XattrSet::Any);
        let bob = user(1001, 1001, &[]);
        let dir = kit.common("d").await;
        let id = kit.file(&ann, dir, "program", 0o755, b"").await;
        for n in [&b"security.capability"[..], b"security.other", b"trusted.t"] {
            assert_eq!(errno(kit.fs.setxattr(&ann, id, n, &capability, any).await), Errno::EPERM);
            kit.fs.setxattr(root, id, n, &capability, any).await.unwrap();
            assert_eq!(errno(kit.fs.removexattr(&bob, id, n).await), Errno::EPERM);
        }
        // A client's kernel takes capabilities from a program before its owner changes it.
        kit.fs.removexattr(&ann, id, b"security.capability").await.unwrap();
        for n in [&b"security.other"[..], b"trusted.t"] {
            assert_eq!(errno(kit.fs.removexattr(&ann, id, n).await), Errno::EPERM);
        }
        assert_eq!(errno(kit.fs.getxattr(&ann, id, b"trusted.t").await), Errno::ENODATA);
        assert_eq!(kit.fs.getxattr(root, id, b"trusted.t").await.unwrap(), capability);
        let listed = async |cx: &Context| {
            let list = kit.fs.listxattr(cx, id).await.unwrap();
            list.split(|byte| *byte == 0).any(|n| n == b"trusted.t")
        };
        // btrfs lists such names to everybody, and gives nobody else their values.
        let to_all = kit.fs.info().kind.contains("btrfs");
        assert_eq!((listed(root).await, listed(&ann).await), (true, to_all));
        // Rights that were raised for one call are gone at the next.
        assert_eq!(errno(kit.fs.setxattr(&ann, id, b"security.x", b"", any).await), Errno::EPERM);
        kit.fs.removexattr(root, id, b"trusted.t").await.unwrap();
        assert_eq!(errno(kit.fs.getxattr(root, id, b"trusted.t").await), Errno::ENODATA);
    });
}

// proves: P46
#[test]
fn a_change_of_no_owner_clears_set_id_bits() {
    on_each(&Kind::ALL, async |kit| {
        let (ann, bob, root) = (user(1000, 1000, &[]), user(1001, 1001, &[]), &kit.root_user);
        let dir = kit.common("d").await;
        let bits = SetAttr { mode: Some(0o6777), ..SetAttr::default() };
        for (who, left) in [(&bob, 0o6777), (&ann, 0o777), (root, 0o777)] {
            let id = kit.file(&ann, dir, &format!("f{}", who.who.uid.0), 0o777, b"").await;
            kit.fs.setattr(&ann, id, bits).await.unwrap();
            let attr = kit.fs.setattr(who, id, SetAttr::default()).await.unwrap();
            assert_eq!(attr.mode & 0o7777, left, "{:?}", who.who.uid);
        }
    });
}

// proves: P51
#[test]
fn user_attributes_come_and_go() {
    on_each(&[Kind::Ext4, Kind::Xfs, Kind::Btrfs, Kind::Overlay], async |kit| {
        let (ann, bob) = (user(1000, 1000, &[]), user(1001, 1001, &[]));
        let dir = kit.common("d").await;
        let id = kit.file(&ann, dir, "f", 0o600, b"").await;
        let set =
            async |n: &[u8], value: &[u8], how| kit.fs.setxattr(&ann, id, n, value, how).await;
        if let Err(error) = set(b"user.a", b"1", XattrSet::Create).await {
            assert_eq!(error.errno(), Errno::ENOTSUP);
            return eprintln!("left out: no user attributes here");
        }
        assert_eq!(errno(set(b"user.a", b"2", XattrSet::Create).await), Errno::EEXIST);
        assert_eq!(errno(set(b"user.b", b"2", XattrSet::Replace).await), Errno::ENODATA);
        set(b"user.a", &[7; 600], XattrSet::Replace).await.unwrap();
        assert_eq!(kit.fs.getxattr(&ann, id, b"user.a").await.unwrap(), [7; 600]);
        assert_eq!(errno(kit.fs.getxattr(&bob, id, b"user.a").await), Errno::EACCES);
        assert_eq!(kit.fs.listxattr(&ann, id).await.unwrap(), b"user.a\0");
        assert_eq!(errno(set(b"user.a\0b", b"", XattrSet::Any).await), Errno::EINVAL);
        assert_eq!(errno(set(b"", b"", XattrSet::Any).await), Errno::ERANGE);
        assert_eq!(errno(set(b"user.a", &[0; 70_000], XattrSet::Any).await), Errno::E2BIG);
    });
}

// proves: P51
#[test]
fn times_as_utimensat_has_them() {
    on_each(&Kind::ALL, async |kit| {
        let (ann, bob) = (user(1000, 1000, &[]), user(1001, 1001, &[]));
        let dir = kit.common("d").await;
        let id = kit.file(&ann, dir, "f", 0o666, b"").await;
        let old = Timestamp { sec: -5, nsec: 7 };
        let at = SetAttr { mtime: Some(TimeSet::At(old)), ..SetAttr::default() };
        let before = kit.fs.getattr(&ann, id).await.unwrap();
        let after = kit.fs.setattr(&ann, id, at).await.unwrap();
        assert_eq!((after.mtime, after.atime), (old, before.atime));
        assert_eq!(errno(kit.fs.setattr(&bob, id, at).await), Errno::EPERM);
        let now = Some(TimeSet::Now);
        let now = SetAttr { atime: now, mtime: now, ..SetAttr::default() };
        assert!(kit.fs.setattr(&bob, id, now).await.unwrap().mtime > old);
    });
}

// proves: P52
#[test]
fn squashed_and_read_only_exports() {
    let Some(disk) = Disk::new(Kind::Tmpfs, 16) else { return };
    on(&disk, plain(), async |kit| {
        let common = kit.common("d").await;
        kit.file(&kit.root_user, common, "roots", 0o600, b"r").await;
    });
    on(&disk, PosixOptions::default(), async |kit| {
        let root = &kit.root_user;
        let dir = kit.lookup(root, kit.root, "d").await.unwrap().id;
        let roots = kit.lookup(root, dir, "roots").await.unwrap().id;
        assert_eq!(errno(kit.fs.open(root, roots, OpenHow::READ).await), Errno::EACCES);
        let (entry, _file) = kit.create(root, dir, "mine", 0o644).await.unwrap();
        assert_eq!((entry.attr.uid, entry.attr.gid), Squash::NOBODY);
        let refused = kit.fs.setxattr(root, entry.id, b"trusted.t", b"", XattrSet::Any).await;
        assert_eq!(errno(refused), Errno::EPERM);
    });
    let all = PosixOptions { squash: Squash::All(Uid(7), Gid(8)), ..plain() };
    on(&disk, all, async |kit| {
        let cx = user(1000, 1000, &[]);
        let dir = kit.lookup(&cx, kit.root, "d").await.unwrap().id;
        let (entry, _file) = kit.create(&cx, dir, "squashed", 0o644).await.unwrap();
        assert_eq!((entry.attr.uid, entry.attr.gid), (Uid(7), Gid(8)));
    });
    on(&disk, PosixOptions { read_only: true, ..plain() }, async |kit| {
        let root = &kit.root_user;
        assert!(kit.fs.info().read_only);
        let dir = kit.lookup(root, kit.root, "d").await.unwrap().id;
        let file = kit.lookup(root, dir, "roots").await.unwrap().id;
        kit.fs.open(root, file, OpenHow::READ).await.unwrap();
        assert_eq!(errno(kit.fs.open(root, file, OpenHow::READ_WRITE).await), Errno::EROFS);
        let trunc = OpenHow::new(libc::O_RDONLY | libc::O_TRUNC);
        assert_eq!(errno(kit.fs.open(root, file, trunc).await), Errno::EROFS);
        assert_eq!(errno(kit.create(root, dir, "new", 0o644).await), Errno::EROFS);
        assert_eq!(errno(kit.unlink(root, dir, "roots").await), Errno::EROFS);
        assert_eq!(errno(kit.mkdir(root, dir, "new", 0o755).await), Errno::EROFS);
        let moved = kit.rename(root, (dir, "roots"), (dir, "x"), RenameHow::Replace).await;
        assert_eq!(errno(moved), Errno::EROFS);
        let set = SetAttr { mode: Some(0), ..SetAttr::default() };
        assert_eq!(errno(kit.fs.setattr(root, file, set).await), Errno::EROFS);
        assert_eq!(errno(kit.fs.access(root, file, Access(2)).await), Errno::EROFS);
        let refused = kit.fs.setxattr(root, file, b"trusted.t", b"", XattrSet::Any).await;
        assert_eq!(errno(refused), Errno::EROFS);
    });
}
