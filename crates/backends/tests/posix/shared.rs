//! Several servers of one directory: what one of them says of a file holds at the others.

use crate::rig::*;
use dray_backends::posix::{PosixOptions, Root, Squash};
use dray_core::*;

const KEY: &[u8] = b"trusted.dray.id_key";

/// The options of one of the servers of a projection.
fn of_a_server(kit: &Kit) -> PosixOptions {
    let key = Root::open(&kit.path).unwrap().shared_id_key().unwrap();
    assert!(key.is_some());
    PosixOptions { id_key: key, ..plain() }
}

#[test]
fn the_key_is_made_once_and_is_no_client_s() {
    on_each(&Kind::NATIVE, async |kit| {
        let key = of_a_server(kit).id_key;
        assert_eq!(of_a_server(kit).id_key, key, "it is read when it is there");
        let (fs, root, cx) = (&kit.fs, kit.root, &kit.root_user);
        assert_eq!(errno(fs.getxattr(cx, root, KEY).await), Errno::ENODATA);
        assert_eq!(errno(fs.setxattr(cx, root, KEY, &[0; 16], XattrSet::Any).await), Errno::EPERM);
        assert_eq!(errno(fs.removexattr(cx, root, KEY).await), Errno::EPERM);
        fs.setxattr(cx, root, b"trusted.other", b"1", XattrSet::Any).await.unwrap();
        let listed = fs.listxattr(cx, root).await.unwrap();
        assert!(!listed.windows(KEY.len()).any(|part| part == KEY));
        assert!(listed.windows(13).any(|part| part == b"trusted.other"));
        assert_eq!(of_a_server(kit).id_key, key);
    });
}

/// A client looks names up at one server and uses the ids at another one.
#[test]
fn an_id_of_one_server_means_the_same_at_the_others_and_gives_no_more_rights() {
    on_each(&Kind::NATIVE, async |kit| {
        let options = of_a_server(kit);
        let squashed = Squash::Root(Squash::NOBODY.0, Squash::NOBODY.1);
        let names = export(&kit.path, options.clone());
        let files = export(&kit.path, options.clone());
        let squashing = export(&kit.path, PosixOptions { squash: squashed, ..options });
        assert_eq!(names.info().root, files.info().root);
        let (ann, bob, root) = (user(1000, 1000, &[]), user(1001, 1001, &[]), &kit.root_user);
        let dir = names.make(root, names.info().root, name("d"), Make::Directory { mode: 0o777 });
        let dir = dir.await.unwrap().id;
        let (made, _) = names.create(&ann, dir, name("f"), create_how(0o600)).await.unwrap();
        let id = names.lookup(&ann, dir, name("f")).await.unwrap().id;
        assert_eq!(files.getattr(&ann, id).await.unwrap().ino, made.attr.ino);
        assert_eq!(files.lookup(&ann, dir, name("f")).await.unwrap().id, id);
        files.open(&ann, id, OpenHow::READ_WRITE).await.unwrap();
        assert_eq!(errno(files.open(&bob, id, OpenHow::READ).await), Errno::EACCES);
        files.open(root, id, OpenHow::READ).await.unwrap();
        assert_eq!(errno(squashing.open(root, id, OpenHow::READ).await), Errno::EACCES);
        // The right to search is asked for where names are looked up, as at a single server.
        let closed = names.make(&ann, dir, name("closed"), Make::Directory { mode: 0o700 });
        let closed = closed.await.unwrap().id;
        let (inner, _) = names.create(&ann, closed, name("f"), create_how(0o666)).await.unwrap();
        for server in [&names, &files] {
            assert_eq!(errno(server.lookup(&bob, closed, name("f")).await), Errno::EACCES);
        }
        for server in [&names, &files] {
            // A caller that has the id was let in once; the mode of the file decides, here as there.
            server.open(&bob, inner.id, OpenHow::READ).await.unwrap();
        }
        let made_up = FileId { ino: id.ino, generation: id.generation ^ 1 << 40 };
        assert_eq!(errno(files.getattr(&ann, made_up).await), Errno::ESTALE);
    });
}

/// The server of the name removes it, and the one of the file has not heard of that.
#[test]
fn a_file_that_another_server_removes_is_gone_unless_it_is_open() {
    on_each(&Kind::NATIVE, async |kit| {
        let options = of_a_server(kit);
        let (names, files) = (export(&kit.path, options.clone()), export(&kit.path, options));
        let (cx, root) = (&kit.root_user, names.info().root);
        for open in [true, false] {
            let (entry, _) = names.create(cx, root, name("f"), create_how(0o600)).await.unwrap();
            let id = entry.id;
            let file = files.open(cx, id, OpenHow::READ_WRITE).await.unwrap();
            put(cx, &*file, 0, b"data").await.unwrap();
            let file = Some(file).filter(|_| open);
            files.getattr(cx, id).await.unwrap(); // it is in the cache
            names.remove(cx, root, name("f"), RemoveKind::File).await.unwrap();
            if let Some(file) = file {
                assert_eq!(files.getattr(cx, id).await.unwrap().nlink, 0);
                assert_eq!(get(cx, &*file, 0, 9).await.unwrap(), b"data");
            }
            assert_eq!(errno(files.getattr(cx, id).await), Errno::ESTALE);
        }
    });
}
