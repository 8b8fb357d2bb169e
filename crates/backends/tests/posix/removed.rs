//! A server dies with files open that have no name any more, and another server of the directory goes on.

use crate::rig::*;
use dray_backends::posix::{PosixOptions, Root};
use dray_core::*;

/// The options of one of the servers of a projection with failover.
fn of_a_server(kit: &Kit) -> PosixOptions {
    let id_key = Root::open(&kit.path).unwrap().shared_id_key().unwrap();
    PosixOptions { id_key, keeps_removed: true, ..plain() }
}

fn hidden(kit: &Kit) -> usize {
    std::fs::read_dir(kit.path.join(".dray-removed")).unwrap().count()
}

async fn names_in_root(fs: &dyn FileSystem, cx: &Context) -> Vec<Vec<u8>> {
    let dir = fs.open(cx, fs.info().root, OpenHow::DIRECTORY).await.unwrap();
    let page = dir.readdir(cx, 0, 1 << 16, false).await.unwrap();
    dir.close(cx).await.unwrap();
    page.iter().map(|(name, _)| name.to_vec()).collect()
}

async fn content(file: &dyn OpenFile, cx: &Context) -> Vec<u8> {
    file.read(cx, 0, BufMut::heap(64)).await.map_err(|(error, _)| error).unwrap().filled().to_vec()
}

// proves: P149
#[test]
fn the_next_server_finds_files_that_were_removed_or_replaced_while_open() {
    on_each(&Kind::NATIVE, async |kit| {
        let (dead, next) =
            (export(&kit.path, of_a_server(kit)), export(&kit.path, of_a_server(kit)));
        let (cx, root) = (&kit.root_user, dead.info().root);
        let mut files = Vec::new();
        for text in ["removed", "replaced", "left"] {
            let (entry, file) = dead.create(cx, root, name(text), create_how(0o600)).await.unwrap();
            file.write(cx, Write::at(0), Buf::from(text.as_bytes())).await.unwrap();
            files.push((entry.id, file, text));
        }
        dead.make(cx, root, name("other"), Make::Node { mode: libc::S_IFREG | 0o600, rdev: 0 })
            .await
            .unwrap();
        dead.remove(cx, root, name("removed"), RemoveKind::File).await.unwrap();
        let to = (root, name("replaced"));
        dead.rename(cx, (root, name("other")), to, RenameHow::Replace).await.unwrap();
        dead.remove(cx, root, name("left"), RemoveKind::File).await.unwrap();
        assert_eq!(hidden(kit), 3);
        for (id, file, text) in &files {
            assert_eq!(file.getattr(cx).await.unwrap().nlink, 0, "{text}");
            assert_eq!(dead.getattr(cx, *id).await.unwrap().nlink, 0, "{text}");
        }
        for server in [&dead, &next] {
            let names = names_in_root(&**server, cx).await;
            assert!(names.contains(&b"replaced".to_vec()), "{names:?}");
            assert!(!names.contains(&b".dray-removed".to_vec()), "{names:?}");
            assert_eq!(errno(server.lookup(cx, root, name(".dray-removed")).await), Errno::ENOENT);
        }

        // As its death would do it, or the loss of a slice: no client has closed them.
        let files: Vec<_> = files.into_iter().map(|(id, _, text)| (id, text)).collect();
        drop(dead);
        next.find_removed().unwrap();
        let mut opened = Vec::new();
        for (id, text) in &files[..2] {
            let file = next.open(cx, *id, OpenHow::READ_WRITE).await.unwrap();
            assert_eq!(content(&*file, cx).await, text.as_bytes());
            assert_eq!(file.getattr(cx).await.unwrap().nlink, 0, "{text}");
            opened.push(file);
        }
        // Of the slice that it took over, and of another one.
        next.forget_removed(|_| false);
        assert_eq!(hidden(kit), 3);
        next.forget_removed(|_| true);
        assert_eq!(hidden(kit), 2);
        for file in opened {
            file.close(cx).await.unwrap();
            drop(file);
        }
        assert_eq!(hidden(kit), 0);
    });
}

#[test]
fn a_file_that_nobody_has_open_gets_no_hidden_name() {
    on_each(&Kind::NATIVE, async |kit| {
        let fs = export(&kit.path, of_a_server(kit));
        let (cx, root) = (&kit.root_user, fs.info().root);
        let (_, file) = fs.create(cx, root, name("f"), create_how(0o600)).await.unwrap();
        file.close(cx).await.unwrap();
        drop(file);
        fs.remove(cx, root, name("f"), RemoveKind::File).await.unwrap();
        assert_eq!(hidden(kit), 0);
        let dir = fs.make(cx, root, name("d"), Make::Directory { mode: 0o700 }).await.unwrap().id;
        let (_, file) = fs.create(cx, dir, name("f"), create_how(0o600)).await.unwrap();
        fs.remove(cx, dir, name("f"), RemoveKind::File).await.unwrap();
        fs.remove(cx, root, name("d"), RemoveKind::Directory).await.unwrap();
        assert_eq!(hidden(kit), 1);
        file.close(cx).await.unwrap();
        drop(file);
        assert_eq!(hidden(kit), 0);
    });
}
