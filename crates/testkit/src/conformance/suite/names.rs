//! Names: making, removing, renaming, linking, and ids.

use std::sync::Arc;
use std::time::Duration;

use dray_core::{
    CreateHow, Errno, FileId, FileType, Make, OpenFile, OpenHow, RemoveKind, RenameHow,
};

use super::place::{TestDirectory, close, errno, name, read, user, write};

const EXCLUSIVE: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

// proves: P30
pub(super) async fn exclusive_create_has_one_winner(place: &TestDirectory) {
    let (entry, file) =
        place.client(0).create(&user(0), place.dir, &name("one"), EXCLUSIVE).await.unwrap();
    let again = place.client(1).create(&user(0), place.dir, &name("one"), EXCLUSIVE).await;
    assert_eq!(errno(again), Some(Errno::EEXIST));
    assert_eq!(place.lookup("one").await.unwrap().id, entry.id);
    assert_eq!(file.id(), entry.id);
    close(file).await;
}

pub(super) async fn create_opens_what_is_there_unless_exclusive(place: &TestDirectory) {
    let (entry, file) = place.file("there").await;
    write(&file, 0, b"content").await;
    let how = CreateHow { exclusive: false, ..EXCLUSIVE };
    let (found, opened) =
        place.client(1).create(&user(0), place.dir, &name("there"), how).await.unwrap();
    assert_eq!(found.id, entry.id);
    assert_eq!(read(&opened, 0, 100).await, b"content");
    close(opened).await;
    let open = OpenHow::new(libc::O_RDWR | libc::O_TRUNC);
    let how = CreateHow { open, ..how };
    let (found, opened) =
        place.client(1).create(&user(0), place.dir, &name("there"), how).await.unwrap();
    assert_eq!((found.id, found.attr.size), (entry.id, 0));
    assert_eq!(read(&file, 0, 100).await, b"");
    close(opened).await;
    close(file).await;
}

// proves: P30
pub(super) async fn the_mode_does_not_limit_the_first_open(place: &TestDirectory) {
    let how = CreateHow { mode: 0o444, ..EXCLUSIVE };
    let (entry, file) =
        place.fs().create(&user(1), place.dir, &name("readonly"), how).await.unwrap();
    assert_eq!(entry.attr.mode & 0o7777, 0o444);
    write(&file, 0, b"git does this").await;
    let again = place.fs().open(&user(1), entry.id, OpenHow::READ_WRITE).await;
    assert_eq!(errno(again), Some(Errno::EACCES));
    close(file).await;
}

pub(super) async fn names_that_end_badly_answer_as_linux_does(place: &TestDirectory) {
    let (fs, cx, dir) = (place.fs(), user(0), place.dir);
    let (file, opened) = place.file("file").await;
    close(opened).await;
    place.mkdir("full").await;
    let full = place.lookup("full").await.unwrap().id;
    place.mkdir_in(full, "inner").await;
    assert_eq!(errno(place.lookup("missing").await), Some(Errno::ENOENT));
    assert_eq!(errno(fs.lookup(&cx, file.id, &name("x")).await), Some(Errno::ENOTDIR));
    let removed = |text, kind| async move { errno(place.remove(text, kind).await) };
    assert_eq!(removed("missing", RemoveKind::File).await, Some(Errno::ENOENT));
    assert_eq!(removed("full", RemoveKind::File).await, Some(Errno::EISDIR));
    assert_eq!(removed("file", RemoveKind::Directory).await, Some(Errno::ENOTDIR));
    assert_eq!(removed("full", RemoveKind::Directory).await, Some(Errno::ENOTEMPTY));
    let taken = fs.make(&cx, dir, &name("file"), Make::Directory { mode: 0o755 }).await;
    assert_eq!(errno(taken), Some(Errno::EEXIST));
    let longest = name(&"x".repeat(255));
    fs.make(&cx, dir, &longest, Make::Directory { mode: 0o755 }).await.unwrap();
    fs.remove(&cx, dir, &longest, RemoveKind::Directory).await.unwrap();
    let link = fs.make(&cx, dir, &name("link"), Make::Symlink { target: b"\xff/x" }).await.unwrap();
    assert_eq!(link.attr.file_type(), FileType::Symlink);
    assert_eq!(fs.readlink(&cx, link.id).await.unwrap(), b"\xff/x");
    assert_eq!(errno(fs.readlink(&cx, file.id).await), Some(Errno::EINVAL));
    assert_eq!(errno(fs.open(&cx, link.id, OpenHow::READ).await), Some(Errno::ELOOP));
    assert_eq!(errno(fs.open(&cx, full, OpenHow::READ_WRITE).await), Some(Errno::EISDIR));
    assert_eq!(errno(fs.open(&cx, file.id, OpenHow::DIRECTORY).await), Some(Errno::ENOTDIR));
}

pub(super) async fn a_parent_is_found_and_the_root_is_its_own(place: &TestDirectory) {
    let (fs, cx) = (place.fs(), user(0));
    let one = place.mkdir("one").await;
    let two = place.mkdir_in(one, "two").await;
    assert_eq!(fs.parent(&cx, two).await.unwrap().id, one);
    assert_eq!(fs.parent(&cx, one).await.unwrap().id, place.dir);
    let root = fs.info().root;
    assert_eq!(fs.parent(&cx, root).await.unwrap().id, root);
}

// proves: P31
pub(super) async fn rename_replaces_keeps_back_and_exchanges(place: &TestDirectory) {
    let (fs, cx, dir) = (place.client(1), user(0), place.dir);
    let (a, b) = (name("a"), name("b"));
    let (id_a, file_a) = place.file("a").await;
    let (id_b, file_b) = place.file("b").await;
    let rename = |how| fs.rename(&cx, (dir, &a), (dir, &b), how);
    assert_eq!(errno(rename(RenameHow::NoReplace).await), Some(Errno::EEXIST));
    rename(RenameHow::Exchange).await.unwrap();
    assert_eq!(place.lookup("a").await.unwrap().id, id_b.id);
    assert_eq!(place.lookup("b").await.unwrap().id, id_a.id);
    rename(RenameHow::Replace).await.unwrap();
    assert_eq!(errno(place.lookup("a").await), Some(Errno::ENOENT));
    assert_eq!(place.lookup("b").await.unwrap().id, id_b.id);
    assert_eq!(file_a.getattr(&cx).await.unwrap().nlink, 0, "what was replaced has no name");
    assert_eq!(errno(rename(RenameHow::Exchange).await), Some(Errno::ENOENT));
    fs.rename(&cx, (dir, &b), (dir, &a), RenameHow::NoReplace).await.unwrap();
    assert_eq!(place.lookup("a").await.unwrap().id, id_b.id);
    close(file_a).await;
    close(file_b).await;
}

pub(super) async fn a_directory_does_not_go_into_itself(place: &TestDirectory) {
    let (fs, cx, dir) = (place.fs(), user(0), place.dir);
    let outer = place.mkdir("outer").await;
    let inner = place.mkdir_in(outer, "inner").await;
    let (from, to) = (name("outer"), name("x"));
    let result = fs.rename(&cx, (dir, &from), (inner, &to), RenameHow::Replace).await;
    assert_eq!(errno(result), Some(Errno::EINVAL));
    let result = fs.rename(&cx, (outer, &name("inner")), (dir, &from), RenameHow::Replace).await;
    assert_eq!(errno(result), Some(Errno::ENOTEMPTY));
}

// proves: P35
pub(super) async fn links_count_and_outlive_each_other(place: &TestDirectory) {
    let (fs, cx, dir) = (place.fs(), user(0), place.dir);
    let (entry, file) = place.file("first").await;
    write(&file, 0, b"shared").await;
    close(file).await;
    let linked = place.client(1).link(&cx, entry.id, dir, &name("second")).await.unwrap();
    assert_eq!((linked.id, linked.attr.nlink), (entry.id, 2));
    assert_eq!(errno(fs.link(&cx, entry.id, dir, &name("first")).await), Some(Errno::EEXIST));
    assert_eq!(errno(fs.link(&cx, dir, dir, &name("loop")).await), Some(Errno::EPERM));
    place.remove("first", RemoveKind::File).await.unwrap();
    let left = place.lookup("second").await.unwrap();
    assert_eq!((left.id, left.attr.nlink), (entry.id, 1));
    let file = fs.open(&cx, left.id, OpenHow::READ).await.unwrap();
    assert_eq!(read(&file, 0, 10).await, b"shared");
    close(file).await;
}

// proves: P35
pub(super) async fn an_unnamed_file_gets_its_first_name(place: &TestDirectory) {
    let (fs, cx, dir) = (place.fs(), user(0), place.dir);
    let how = CreateHow { exclusive: false, ..EXCLUSIVE };
    let (entry, file) = match fs.tmpfile(&cx, dir, how).await {
        Ok(made) => made,
        Err(error) if error.errno() == Errno::ENOTSUP => return,
        Err(error) => panic!("a file without a name: {error:?}"),
    };
    assert_eq!(entry.attr.nlink, 0);
    write(&file, 0, b"finished").await;
    let linked = fs.link(&cx, entry.id, dir, &name("result")).await.unwrap();
    assert_eq!((linked.id, linked.attr.nlink), (entry.id, 1));
    close(file).await;
    let file = fs.open(&cx, entry.id, OpenHow::READ).await.unwrap();
    assert_eq!(read(&file, 0, 10).await, b"finished");
    close(file).await;
}

// proves: P38
pub(super) async fn ids_survive_rename_and_die_with_the_file(place: &TestDirectory) {
    let (id, new) = renamed_and_removed(place).await;
    is_stale(place, id).await;
    close(new).await;
}

/// The same where a look at the file that is under way may end first.
pub(super) async fn ids_survive_rename_and_die_soon_after_the_file(place: &TestDirectory) {
    let (id, new) = renamed_and_removed(place).await;
    for fs in [place.client(0), place.client(1)] {
        for _ in 0..200 {
            if errno(fs.getattr(&user(0), id).await).is_some() {
                break;
            }
            dray_rt::sleep(Duration::from_millis(10)).await;
        }
    }
    is_stale(place, id).await;
    close(new).await;
}

/// The id of a file that is gone, and the open file that was made in its place.
async fn renamed_and_removed(place: &TestDirectory) -> (FileId, Arc<dyn OpenFile>) {
    let (fs, cx, dir) = (place.fs(), user(0), place.dir);
    let (entry, file) = place.file("before").await;
    close(file).await;
    let to = (dir, &*name("after"));
    fs.rename(&cx, (dir, &name("before")), to, RenameHow::Replace).await.unwrap();
    assert_eq!(place.client(1).getattr(&cx, entry.id).await.unwrap().ino, entry.attr.ino);
    place.remove("after", RemoveKind::File).await.unwrap();
    // Made at once, so that a file system that uses numbers again has the chance to.
    let (new, file) = place.file("after").await;
    assert_ne!(new.id, entry.id);
    (entry.id, file)
}

async fn is_stale(place: &TestDirectory, id: FileId) {
    let cx = user(0);
    for fs in [place.client(0), place.client(1)] {
        assert_eq!(errno(fs.getattr(&cx, id).await), Some(Errno::ESTALE));
        assert_eq!(errno(fs.open(&cx, id, OpenHow::READ).await), Some(Errno::ESTALE));
    }
}
