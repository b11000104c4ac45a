import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.util.Base64;
import java.util.HashMap;
import java.util.Map;
import java.util.Properties;
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
import org.apache.hadoop.minikdc.MiniKdc;
import org.apache.hadoop.security.UserGroupInformation;
import org.apache.kerby.kerberos.kerb.client.KrbClient;

/**
 * A whole HDFS in one process, on loopback, for the tests beside this file: started with a mode (plain, ha, kerberos)
 * and a directory of its own, told what to do line by line, gone with its standard input. Each line is a command and
 * its arguments, in Base64 where they are names; each is answered by one line that begins with "ok" or "error".
 */
public final class MiniHdfs {
  private static final String REALM_USER = "alice";

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
    settings.setBoolean("dfs.namenode.edits.noeditlogchannelflush", true);
    StringBuilder ready = new StringBuilder("ok");
    if (mode.equals("kerberos")) {
      secure(settings, place, ready);
    }
    MiniDFSCluster.Builder builder =
        new MiniDFSCluster.Builder(settings).numDataNodes(2).checkDataNodeHostConfig(false);
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

  private static void secure(Configuration settings, File place, StringBuilder ready) throws Exception {
    Properties kdcSettings = MiniKdc.createConf();
    kdcSettings.setProperty(MiniKdc.KDC_BIND_ADDRESS, "127.0.0.1");
    MiniKdc kdc = new MiniKdc(kdcSettings, place);
    kdc.start();
    File servers = new File(place, "servers.keytab");
    kdc.createPrincipal(servers, "hdfs/localhost", "HTTP/localhost");
    File user = new File(place, "user.keytab");
    kdc.createPrincipal(user, REALM_USER);
    String realm = kdc.getRealm();
    // As somebody's kinit would leave it.
    KrbClient client = new KrbClient(kdc.getKrb5conf().getParentFile());
    client.setKdcHost("127.0.0.1");
    client.setAllowUdp(false);
    client.setKdcTcpPort(kdc.getPort());
    client.init();
    client.storeTicket(client.requestTgt(REALM_USER + "@" + realm, user), new File(place, "user.ccache"));
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
        for (int n = 0; n < count; n++) {
          files.create(new Path(path(words[1]), String.format("%06d", n))).close();
        }
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
      case "stop-datanode":
        cluster.stopDataNode(Integer.parseInt(words[1]));
        return "";
      case "corrupt": // path, DataNode: its replica of the first block
        cluster.corruptReplica(Integer.parseInt(words[2]), DFSTestUtil.getFirstBlock(files, path(words[1])));
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
