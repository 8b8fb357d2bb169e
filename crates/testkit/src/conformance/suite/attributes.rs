//! Attributes, permissions, extended attributes, space.

use dray_core::{
    Access, Buf, CreateHow, Errno, Gid, Make, OpenHow, RemoveKind, RenameHow, SetAttr, TimeSet,
    Timestamp, Uid, Write, XATTR_MAX_BYTES, XattrSet,
};

use super::place::{TestDirectory, close, errno, name, user, write};

pub(super) async fn attributes_change_alone(place: &TestDirectory) {
    let (fs, cx) = (place.client(1), user(0));
    let (entry, file) = place.file("file").await;
    write(&file, 0, &[1; 5000]).await;
    let set = SetAttr { mode: Some(0o640), ..SetAttr::default() };
    let attr = fs.setattr(&cx, entry.id, set).await.unwrap();
    assert_eq!((attr.mode, attr.size), (libc::S_IFREG | 0o640, 5000));
    let set = SetAttr { uid: Some(Uid(1001)), gid: Some(Gid(3000)), ..SetAttr::default() };
    let attr = fs.setattr(&cx, entry.id, set).await.unwrap();
    assert_eq!((attr.uid, attr.gid, attr.mode & 0o777), (Uid(1001), Gid(3000), 0o640));
    let time = Timestamp { sec: 987_654_321, nsec: 0 };
    let set = SetAttr { mtime: Some(TimeSet::At(time)), ..SetAttr::default() };
    let attr = fs.setattr(&cx, entry.id, set).await.unwrap();
    assert_eq!(attr.mtime, time);
    assert!(attr.atime.sec > time.sec && attr.ctime.sec > time.sec, "the others stay or are now");
    let set = SetAttr { size: Some(100), ..SetAttr::default() };
    let attr = fs.setattr(&cx, entry.id, set).await.unwrap();
    assert_eq!(attr.size, 100);
    assert!(attr.mtime > time, "a cut is a change");
    assert_eq!(place.fs().getattr(&cx, entry.id).await.unwrap(), attr, "every client sees it");
    close(file).await;
}

// proves: P46
pub(super) async fn a_write_clears_set_id_bits(place: &TestDirectory) {
    let (entry, file) = place.file("tool").await;
    let set = SetAttr { mode: Some(0o6777), ..SetAttr::default() };
    let mode = || async { place.fs().getattr(&user(0), entry.id).await.unwrap().mode & 0o7777 };
    place.fs().setattr(&user(0), entry.id, set).await.unwrap();
    assert_eq!(mode().await, 0o6777);
    file.write(&user(1), Write::at(0), Buf::from(&b"x"[..])).await.unwrap();
    assert_eq!(mode().await, 0o777);
    close(file).await;
}

pub(super) async fn permissions_are_checked(place: &TestDirectory) {
    let fs = place.fs();
    let what = Make::Directory { mode: 0o750 };
    let private = fs.make(&user(1), place.dir, &name("private"), what).await.unwrap().id;
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: true };
    let (entry, file) = fs.create(&user(1), private, &name("file"), how).await.unwrap();
    close(file).await;
    let other = user(2);
    assert_eq!(errno(fs.lookup(&other, private, &name("file")).await), Some(Errno::EACCES));
    assert_eq!(errno(fs.open(&other, entry.id, OpenHow::READ).await), Some(Errno::EACCES));
    assert_eq!(errno(fs.open(&other, private, OpenHow::DIRECTORY).await), Some(Errno::EACCES));
    let made = fs.make(&other, private, &name("x"), what).await;
    assert_eq!(errno(made), Some(Errno::EACCES));
    let removed = fs.remove(&other, private, &name("file"), RemoveKind::File).await;
    assert_eq!(errno(removed), Some(Errno::EACCES));
    let set = SetAttr { mode: Some(0o777), ..SetAttr::default() };
    assert_eq!(errno(fs.setattr(&other, entry.id, set).await), Some(Errno::EPERM));
    let group = SetAttr { gid: Some(Gid(3000)), ..SetAttr::default() };
    fs.setattr(&user(1), private, group).await.unwrap();
    fs.lookup(&other, private, &name("file")).await.unwrap(); // by the group they share
    sticky_directories_keep_the_others_files(place).await;
}

async fn sticky_directories_keep_the_others_files(place: &TestDirectory) {
    let (fs, cx) = (place.fs(), user(0));
    let shared = place.mkdir("shared").await;
    let set = SetAttr { mode: Some(0o1777), ..SetAttr::default() };
    fs.setattr(&cx, shared, set).await.unwrap();
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o666, exclusive: true };
    let (_, file) = fs.create(&user(1), shared, &name("mine"), how).await.unwrap();
    close(file).await;
    let (mine, other) = (name("mine"), name("other"));
    let removed = fs.remove(&user(2), shared, &mine, RemoveKind::File).await;
    assert_eq!(errno(removed), Some(Errno::EPERM));
    let moved = fs.rename(&user(2), (shared, &mine), (shared, &other), RenameHow::Replace).await;
    assert_eq!(errno(moved), Some(Errno::EPERM));
    fs.remove(&user(1), shared, &mine, RemoveKind::File).await.unwrap();
}

pub(super) async fn access_answers_for_the_caller(place: &TestDirectory) {
    let (fs, cx) = (place.fs(), user(0));
    let (entry, file) = place.file("file").await;
    close(file).await;
    let set = SetAttr { mode: Some(0o640), uid: Some(Uid(1001)), ..SetAttr::default() };
    fs.setattr(&cx, entry.id, set).await.unwrap();
    let (r, w, x) = (libc::R_OK as u32, libc::W_OK as u32, libc::X_OK as u32);
    let may = |who, want| async move {
        place.client(1).access(&user(who), entry.id, Access(want)).await.is_ok()
    };
    assert!(may(1, r | w).await && !may(1, x).await);
    assert!(may(2, 0).await && !may(2, r).await);
    assert!(may(0, r | w).await && !may(0, x).await, "nobody may execute it, not even root");
}

pub(super) async fn statfs_makes_sense(place: &TestDirectory) {
    let found = place.fs().statfs(&user(0)).await.unwrap();
    assert!(found.block_bytes > 0 && found.blocks > 0);
    assert!(found.blocks_free <= found.blocks && found.blocks_available <= found.blocks_free);
    assert_eq!(found.name_max_bytes, 255);
}

pub(super) async fn xattrs_are_kept(place: &TestDirectory) {
    let (fs, cx) = (place.fs(), user(0));
    let (entry, file) = place.file("file").await;
    close(file).await;
    let id = entry.id;
    let set = |value: &'static [u8], how| {
        let fs = place.client(1);
        async move { fs.setxattr(&user(0), id, b"user.key", value, how).await }
    };
    assert_eq!(errno(set(b"x", XattrSet::Replace).await), Some(Errno::ENODATA));
    set(b"one", XattrSet::Create).await.unwrap();
    assert_eq!(errno(set(b"x", XattrSet::Create).await), Some(Errno::EEXIST));
    assert_eq!(fs.getxattr(&cx, id, b"user.key").await.unwrap(), b"one");
    set(b"", XattrSet::Replace).await.unwrap();
    assert_eq!(fs.getxattr(&cx, id, b"user.key").await.unwrap(), b"");
    let list = fs.listxattr(&cx, id).await.unwrap();
    assert!(list.split(|&byte| byte == 0).any(|name| name == b"user.key"));
    fs.removexattr(&cx, id, b"user.key").await.unwrap();
    assert_eq!(errno(fs.getxattr(&cx, id, b"user.key").await), Some(Errno::ENODATA));
    assert_eq!(errno(fs.removexattr(&cx, id, b"user.key").await), Some(Errno::ENODATA));
    let big = vec![0; XATTR_MAX_BYTES + 1];
    let refused = fs.setxattr(&cx, id, b"user.big", &big, XattrSet::Any).await;
    assert_eq!(errno(refused), Some(Errno::E2BIG));
    let strange = fs.setxattr(&cx, id, b"strange.name", b"x", XattrSet::Any).await;
    assert_eq!(errno(strange), Some(Errno::ENOTSUP));
}
