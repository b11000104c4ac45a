import java.io.BufferedReader;
import java.io.File;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.io.UncheckedIOException;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.security.PrivilegedExceptionAction;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.stream.IntStream;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.permission.FsPermission;
import org.apache.hadoop.hdfs.DFSTestUtil;
import org.apache.hadoop.hdfs.DistributedFileSystem;
import org.apache.hadoop.hdfs.MiniDFSCluster;
import org.apache.hadoop.hdfs.MiniDFSNNTopology;
import org.apache.hadoop.hdfs.client.HdfsClientConfigKeys;
import org.apache.hadoop.hdfs.protocol.HdfsConstants.SafeModeAction;
import org.apache.hadoop.hdfs.server.datanode.DataNode;
import org.apache.hadoop.hdfs.server.namenode.NameNode;
import org.apache.hadoop.metrics2.lib.MutableCounterLong;
import org.apache.hadoop.minikdc.MiniKdc;
import org.apache.hadoop.security.Credentials;
import org.apache.hadoop.security.UserGroupInformation;
import org.apache.kerby.kerberos.kerb.client.KrbClient;

/**
 * A whole HDFS in one process, for tests (../src/hdfs.rs): started with a mode (plain, ha, kerberos), a directory of its own
 * and perhaps the address at which clients find it (else on loopback), told what to do line by line, gone with its standard
 * input. Each line is a command and its arguments, in Base64 where they are names; each is answered by one line that begins
 * with "ok" or "error".
 */
public final class MiniHdfs {
  private static final String REALM_USER = "alice";

  /** Of the user, where there is a KDC. */
  private static KrbClient client;
  private static String principal;
  private static File keytab;

  private final MiniDFSCluster cluster;
  private final DistributedFileSystem files;
  private final Map<String, FSDataOutputStream> open = new HashMap<>();

  private MiniHdfs(MiniDFSCluster cluster, DistributedFileSystem files) {
    this.cluster = cluster;
    this.files = files;
  }

  public static void main(String[] arguments) throws Exception {
    // What logs to standard output goes elsewhere.
    PrintStream answers = System.out;
    System.setOut(System.err);
    String mode = arguments[0];
    File place = new File(arguments[1]);
    Configuration settings = new Configuration();
    settings.set(MiniDFSCluster.HDFS_MINIDFS_BASEDIR, new File(place, "dfs").getPath());
    settings.setLong("dfs.blocksize", 1 << 20);
    settings.setLong("dfs.namenode.fs-limits.min-block-size", 4096);
    settings.setInt("dfs.namenode.handler.count", 4);
    settings.setInt("dfs.namenode.safemode.extension", 0);
    settings.setInt("ipc.client.connect.max.retries", 1);
    // A client that closes a file asks whether its block was reported: at first 400 ms after the first time.
    settings.setInt("dfs.client.block.write.locateFollowingBlock.initial.delay.ms", 10);
    settings.setBoolean("dfs.namenode.edits.noeditlogchannelflush", true);
    StringBuilder ready = new StringBuilder("ok");
    if (mode.startsWith("kerberos")) {
      secure(settings, place, ready, mode.equals("kerberos-short"));
    }
    MiniDFSCluster.Builder builder =
        new MiniDFSCluster.Builder(settings).numDataNodes(2).checkDataNodeHostConfig(false);
    if (arguments.length > 2) {
      // NameNode and DataNodes meet on loopback all the same, so DataNodes are known by a name beside that address.
      settings.set("dfs.namenode.rpc-bind-host", "0.0.0.0");
      settings.set("dfs.datanode.address", "0.0.0.0:0");
      settings.set("dfs.datanode.http.address", "127.0.0.1:0");
      settings.set("dfs.datanode.ipc.address", "127.0.0.1:0");
      builder.checkDataNodeAddrConfig(true).hosts(new String[] {arguments[2], arguments[2]});
    }
    if (mode.equals("ha")) {
      builder.nnTopology(MiniDFSNNTopology.simpleHATopology());
    }
    MiniDFSCluster cluster = builder.build();
    DistributedFileSystem files;
    if (mode.equals("ha")) {
      cluster.transitionToActive(0);
      String nameservice = "millpond";
      Configuration client = new Configuration(settings);
      client.set("dfs.nameservices", nameservice);
      client.set("dfs.ha.namenodes." + nameservice, "nn1,nn2");
      for (int n = 0; n < 2; n++) {
        String address = "127.0.0.1:" + cluster.getNameNodePort(n);
        client.set("dfs.namenode.rpc-address." + nameservice + ".nn" + (n + 1), address);
        ready.append(' ').append(cluster.getNameNodePort(n));
      }
      client.set(HdfsClientConfigKeys.Failover.PROXY_PROVIDER_KEY_PREFIX + "." + nameservice,
          "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider");
      files = (DistributedFileSystem) FileSystem.get(new java.net.URI("hdfs://" + nameservice), client);
    } else {
      files = cluster.getFileSystem();
      ready.append(' ').append(cluster.getNameNodePort());
    }
    cluster.waitActive();
    answers.println(ready);
    answers.flush();
    new MiniHdfs(cluster, files).serve(answers);
    // Its threads would take their time.
    Runtime.getRuntime().halt(0);
  }

  private static void secure(Configuration settings, File place, StringBuilder ready, boolean brief)
      throws Exception {
    Properties kdcSettings = MiniKdc.createConf();
    if (brief) {
      // Seconds, whatever its documentation says: Kerby takes them as they are.
      kdcSettings.setProperty(MiniKdc.MAX_TICKET_LIFETIME, "20");
      kdcSettings.setProperty(MiniKdc.MAX_RENEWABLE_LIFETIME, "20");
      settings.setInt("hadoop.kerberos.min.seconds.before.relogin", 1);
      // Connections that are open need no ticket any more: those that idle are closed.
      settings.setInt("ipc.client.idlethreshold", 0);
      settings.setInt("ipc.client.connection.maxidletime", 1000);
      settings.setInt("ipc.client.connection.idle-scan-interval.ms", 500);
    }
    kdcSettings.setProperty(MiniKdc.KDC_BIND_ADDRESS, "127.0.0.1");
    MiniKdc kdc = new MiniKdc(kdcSettings, place);
    kdc.start();
    File servers = new File(place, "servers.keytab");
    kdc.createPrincipal(servers, "hdfs/localhost", "HTTP/localhost");
    File user = new File(place, "user.keytab");
    kdc.createPrincipal(user, REALM_USER);
    String realm = kdc.getRealm();
    client = new KrbClient(kdc.getKrb5conf().getParentFile());
    client.setKdcHost("127.0.0.1");
    client.setAllowUdp(false);
    client.setKdcTcpPort(kdc.getPort());
    client.init();
    principal = REALM_USER + "@" + realm;
    keytab = user;
    kinit(new File(place, "user.ccache"));
    settings.set("hadoop.security.authentication", "kerberos");
    settings.setBoolean("hadoop.security.authorization", true);
    settings.set("hadoop.rpc.protection", "privacy");
    settings.set("dfs.data.transfer.protection", "privacy");
    settings.setBoolean("dfs.block.access.token.enable", true);
    settings.setBoolean("ignore.secure.ports.for.testing", true);
    settings.set("dfs.http.policy", "HTTP_ONLY");
    for (String part : new String[] {"namenode", "datanode"}) {
      settings.set("dfs." + part + ".kerberos.principal", "hdfs/localhost@" + realm);
      settings.set("dfs." + part + ".keytab.file", servers.getPath());
    }
    settings.set("dfs.web.authentication.kerberos.principal", "HTTP/localhost@" + realm);
    settings.set("dfs.web.authentication.kerberos.keytab", servers.getPath());
    UserGroupInformation.setConfiguration(settings);
    UserGroupInformation.loginUserFromKeytab("hdfs/localhost@" + realm, servers.getPath());
    ready.append(' ').append(realm).append(' ').append(kdc.getPort());
  }

  /** A cache of tickets, as somebody's kinit would leave it. */
  private static void kinit(File to) throws Exception {
    client.storeTicket(client.requestTgt(principal, keytab), to);
  }

  private void serve(PrintStream answers) throws Exception {
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      String answer;
      try {
        answer = ("ok " + run(line.split(" "))).trim();
      } catch (Exception e) {
        answer = "error " + String.valueOf(e).replace('\n', ' ');
      }
      answers.println(answer);
      answers.flush();
    }
  }

  /** Each file waits for DataNodes, so many are written at once. */
  private void putTree(Path to, File from, long blockSize) throws Exception {
    ExecutorService writers = Executors.newFixedThreadPool(16);
    try {
      List<Future<?>> all = new ArrayList<>();
      putTree(to, from, blockSize, writers, all);
      for (Future<?> one : all) {
        one.get();
      }
    } finally {
      writers.shutdownNow();
    }
  }

  private void putTree(Path to, File from, long blockSize, ExecutorService writers, List<Future<?>> all)
      throws IOException {
    files.mkdirs(to);
    for (File entry : from.listFiles()) {
      Path there = new Path(to, entry.getName());
      if (entry.isDirectory()) {
        putTree(there, entry, blockSize, writers, all);
      } else {
        all.add(writers.submit(() -> {
          try (FSDataOutputStream out = files.create(
              there, FsPermission.getFileDefault(), true, 1 << 16, (short) 2, blockSize, null)) {
            Files.copy(entry.toPath(), out);
          }
          return null;
        }));
      }
    }
  }

  /** What a part counts of itself. By its fields: what it shows to others is up to ten seconds old. */
  private static long counted(Object metrics, String... names) throws ReflectiveOperationException {
    long sum = 0;
    for (String name : names) {
      Field field = metrics.getClass().getDeclaredField(name);
      field.setAccessible(true);
      sum += ((MutableCounterLong) field.get(metrics)).value();
    }
    return sum;
  }

  private String served() throws ReflectiveOperationException {
    long bytes = 0;
    long questions = counted(
        NameNode.getNameNodeMetrics(), "getListingOps", "fileInfoOps", "getBlockLocations");
    for (DataNode node : cluster.getDataNodes()) {
      bytes += counted(node.getMetrics(), "bytesRead");
      questions += counted(node.getMetrics(), "blocksRead");
    }
    return bytes + " " + questions;
  }

  private static Path path(String encoded) {
    return new Path(null, null, new String(Base64.getDecoder().decode(encoded), StandardCharsets.UTF_8));
  }

  private String run(String[] words) throws Exception {
    switch (words[0]) {
      case "put": // path, local file, block size
        try (FSDataOutputStream out = files.create(
            path(words[1]), FsPermission.getFileDefault(), true, 4096, (short) 2,
            Long.parseLong(words[3]), null)) {
          Files.copy(new File(words[2]).toPath(), out);
        }
        return "";
      case "put-tree": // path, local directory in Base64, block size
        String local = new String(Base64.getDecoder().decode(words[2]), StandardCharsets.UTF_8);
        putTree(path(words[1]), new File(local), Long.parseLong(words[3]));
        return "";
      case "served": // bytes of DataNodes, questions to all servers
        return served();
      case "begin": // path, local file: it stays open
        FSDataOutputStream begun = files.create(path(words[1]), true);
        Files.copy(new File(words[2]).toPath(), begun);
        begun.hflush();
        open.put(words[1], begun);
        return "";
      case "end":
        open.remove(words[1]).close();
        return "";
      case "append":
        try (FSDataOutputStream out = files.append(path(words[1]))) {
          Files.copy(new File(words[2]).toPath(), out);
        }
        return "";
      case "fill": // directory, count
        int count = Integer.parseInt(words[2]);
        Path filled = path(words[1]);
        IntStream.range(0, count).parallel().forEach(n -> {
          try {
            files.create(new Path(filled, String.format("%06d", n))).close();
          } catch (IOException e) {
            throw new UncheckedIOException(e);
          }
        });
        return "";
      case "mkdir":
        return String.valueOf(files.mkdirs(path(words[1])));
      case "delete":
        return String.valueOf(files.delete(path(words[1]), true));
      case "rename":
        return String.valueOf(files.rename(path(words[1]), path(words[2])));
      case "chmod":
        files.setPermission(path(words[1]), new FsPermission(Short.parseShort(words[2], 8)));
        return "";
      case "chown": // path, user, group
        files.setOwner(path(words[1]), words[2], words[3]);
        return "";
      case "stop-datanode":
        cluster.stopDataNode(Integer.parseInt(words[1]));
        return "";
      case "corrupt": // path, DataNode: its replica of the first block
        cluster.corruptReplica(Integer.parseInt(words[2]), DFSTestUtil.getFirstBlock(files, path(words[1])));
        return "";
      case "kinit": // local file
        kinit(new File(words[1]));
        return "";
      case "token": // local file: the user's delegation token
        Credentials tokens = new Credentials();
        UserGroupInformation user =
            UserGroupInformation.loginUserFromKeytabAndReturnUGI(principal, keytab.getPath());
        user.doAs((PrivilegedExceptionAction<Object>) () ->
            FileSystem.newInstance(cluster.getURI(), cluster.getConfiguration(0))
                .addDelegationTokens(REALM_USER, tokens));
        tokens.writeTokenStorageFile(new Path(new File(words[1]).toURI()), new Configuration());
        return "";
      case "failover":
        int to = Integer.parseInt(words[1]);
        cluster.transitionToStandby(1 - to);
        cluster.transitionToActive(to);
        return "";
      case "safemode":
        files.setSafeMode(SafeModeAction.valueOf("SAFEMODE_" + words[1]));
        return "";
      default:
        throw new IllegalArgumentException(words[0]);
    }
  }
}
